/* From the blocks of a file to panels: the same bits in another order, as fast as memory is read by a thread or two.

   Built and called as segments.c is. */

#include "packed.h"

#define LOW 0x0f0f0f0f0f0f0f0full

INLINE uint64_t load64(const uint8_t *from) {
    uint64_t x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Bit `which` of 32 bytes. */
INLINE uint32_t bit_of_each(const uint8_t *from, int which) {
    uint32_t bits = 0;
UNROLL(4)
    for (int i = 0; i < 4; i++) bits |= (uint32_t)((load64(from + 8 * i) >> which & ONES) * 0x0102040810204080ull >> 56) << 8 * i;
    return bits;
}

/* The numbers of a group of 32 weights in a block of the file. low [4]: 32 numbers, or their lowest 4 bits, a byte each; the fifth
   and sixth bits, one for each number, to high [2]. */
INLINE void read_group(int format, const uint8_t *block, int group, uint64_t *low, uint32_t *high) {
    const uint8_t *halves = block + (format == AFTERGLOW_MXFP4 ? 1 : format == AFTERGLOW_Q4_0 ? 2 : format == AFTERGLOW_Q4_1 ? 4
                                     : format == AFTERGLOW_A4 ? 5 : format == AFTERGLOW_Q5_0 ? 6 : 8);
UNROLL(4)
    for (int i = 0; i < 4; i++) switch (format) {
            case AFTERGLOW_Q8_0: low[i] = load64(block + 2 + 8 * i) ^ ONES << 7; break;
            case AFTERGLOW_A8: low[i] = load64(block + 5 + 8 * i); break;
            case AFTERGLOW_Q4_K: low[i] = load64(block + 16 + group / 2 * 32 + 8 * i) >> group % 2 * 4 & LOW; break;
            case AFTERGLOW_Q5_K: low[i] = load64(block + 48 + group / 2 * 32 + 8 * i) >> group % 2 * 4 & LOW; break;
            case AFTERGLOW_Q6_K: low[i] = load64(block + group / 4 * 64 + group % 2 * 32 + 8 * i) >> group % 4 / 2 * 4 & LOW; break;
            default: low[i] = load64(halves + i % 2 * 8) >> i / 2 * 4 & LOW;
        }
    if (format == AFTERGLOW_Q5_0) memcpy(high, block + 2, sizeof *high);
    if (format == AFTERGLOW_Q5_1) memcpy(high, block + 4, sizeof *high);
    if (format == AFTERGLOW_Q5_K) high[0] = bit_of_each(block + 16, group);
    if (format == AFTERGLOW_Q6_K) {
        high[0] = bit_of_each(block + 128 + group / 4 * 32, group % 4 * 2);
        high[1] = bit_of_each(block + 128 + group / 4 * 32, group % 4 * 2 + 1);
    }
}

/* Scale and minimum of a group of Q4_K and Q5_K, 6 bits each in 12 bytes. */
INLINE void read_scales(const uint8_t *scales, int group, uint8_t *scale, uint8_t *minimum) {
    const uint8_t low = scales[group % 4], middle = scales[4 + group % 4], high = scales[8 + group % 4];
    *scale = group < 4 ? low & 63 : (high & 15) | (low >> 2 & 48);
    *minimum = group < 4 ? middle & 63 : high >> 4 | (middle >> 2 & 48);
}

/* The scales of output `o`: those of the block to `head`. */
INLINE void copy_scales(int format, const uint8_t *block, int o, uint8_t *head) {
    const packed_format f = packed_formats[format];
    if (f.kind == ZEROS) memcpy(head + 4 * o, block, 4), head[4 * PANEL + o] = block[4];
    else if (format == AFTERGLOW_MXFP4) head[o] = block[0];
    else memcpy(head + 2 * o, block + (f.kind == HALVES ? 208 : 0), 2);
    if (f.kind == ABOVE) memcpy(head + 2 * PANEL + 2 * o, block + 2, 2);
}

/* One block of up to 16 outputs, `at` bytes from the beginnings of their rows. */
INLINE void pack_block(int format, const uint8_t *const *rows, int64_t at, int outputs, uint8_t *to) {
    const packed_format f = packed_formats[format];
    for (int o = 0; o < outputs; o++) copy_scales(format, rows[o] + at, o, to);
    for (int group = 0; group < f.weights / GROUP; group++) {
        uint8_t *own = to + f.head + group * group_bytes(f), *numbers = own + f.sub;
        uint64_t planes[2][STEPS] = {{0}};
        for (int o = 0; o < outputs; o++) {
            const uint8_t *block = rows[o] + at;
            uint64_t low[4];
            uint32_t high[2] = {0}, steps[STEPS];
            if (f.weights == 256 && f.kind == ABOVE) read_scales(block + 4, group, own + o, own + PANEL + o);
            if (f.kind == HALVES) own[o] = block[192 + 2 * group], own[PANEL + o] = block[193 + 2 * group];
            read_group(format, block, group, low, high);
            if (f.kind == HALVES) low[0] |= low[1] << 4, low[1] = low[2] | low[3] << 4;
            else if (f.wide < 8) low[0] |= low[2] << 4, low[1] |= low[3] << 4;
            memcpy(steps, low, sizeof steps);
UNROLL(8)
            for (int i = 0; i < STEPS; i++)
                if (i < STEPS / 2 || f.wide == 8) memcpy(numbers + i * STEP + 4 * o, steps + i, 4);
            if (f.wide == 8) continue;
UNROLL(8)
            for (int i = 0; i < STEPS; i++) {
                if (f.wide > 4) planes[0][i] |= (uint64_t)(high[0] >> 4 * i & 15) << 4 * o;
                if (f.wide > 5) planes[1][i] |= (uint64_t)(high[1] >> 4 * i & 15) << 4 * o;
            }
        }
        if (f.wide < 8) memcpy(numbers + 4 * STEP, planes, (f.wide - 4) * sizeof *planes);
    }
}

typedef struct {
    const afterglow_matrix *matrix;
    const uint8_t *const *rows;
} packing;

#define PACK(name) \
    case AFTERGLOW_##name: pack_block(AFTERGLOW_##name, rows, i * f.file_bytes, outputs, to + i * block_bytes(f)); break;

static void pack_panels(const void *what, int64_t first, int64_t end, int worker) {
    const packing *job = what;
    const packed_format f = packed_formats[job->matrix->format];
    const int64_t count = job->matrix->inputs / f.weights, size = count * block_bytes(f);
    (void)worker;
    for (int64_t panel = first; panel < end; panel++) {
        uint8_t *to = (uint8_t *)job->matrix->panels + panel * size;
        const uint8_t *const *rows = job->rows + panel * PANEL;
        const int64_t left = job->matrix->outputs - panel * PANEL, outputs = left < PANEL ? left : PANEL;
        if (left < PANEL) memset(to, 0, size);
        for (int64_t i = 0; i < count; i++) switch (job->matrix->format) { EVERY_FORMAT(PACK) }
    }
}

int64_t afterglow_panel_bytes(int64_t format, int64_t inputs) {
    return inputs / packed_formats[format].weights * block_bytes(packed_formats[format]);
}

void afterglow_pack(const afterglow_matrix *matrix, const void *rows, int threads) {
    const packing job = {.matrix = matrix, .rows = rows};
    team_share(pack_panels, &job, (matrix->outputs + PANEL - 1) / PANEL, 4, threads, 1);
}
