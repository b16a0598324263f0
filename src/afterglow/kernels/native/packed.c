/* Products of rows with a matrix in blocks of 4 to 8 bits, as they are in the file: as fast as memory is read for a row or two, and
   near the rate of bytes.c for many.

   A few groups of a panel at a time are unpacked to bytes, which stay in the first cache while all rows of a chunk pass them. Rows
   are rounded here to signed bytes, with a scale for each group of 32 inputs. A group's sum is a whole number, exact; groups are
   added up one after another by the same operations for each row and each kind of vector, so that a row's product depends neither
   on its batch nor on the width of vectors.

   Built and called as segments.c is. */

#include "packed.h"

#include <immintrin.h>

#define CHUNK 240      /* rows, as in matrix.c */
#define ROWS 12        /* of a tile at most: sums of 12 rows and 12 groups are kept in registers, 4 where there are 16 */
#define FEW_ROWS 8     /* pass a panel as it is, as unpacking it takes longer than they do */
#define NARROW_ROWS 4
#define NARROW_FEW 1
#define RUN 8          /* groups that are unpacked at a time: 5 KiB */
#define AHEAD 4096     /* bytes of a panel that are asked for ahead of time */
#define NO_WAKE 262144 /* products */
#define LEVELS 127
#define LEAST_PEAK 1e-30f /* of a group: its reciprocal is finite */
#define ROUNDED(kind) ((kind) == HALVES ? 44 : 40)

typedef int32_t __attribute__((may_alias, aligned(1))) loose_int;

/* Groups to bytes; rows by groups, unpacked or in a panel. */
typedef void packed_unpack(const uint8_t *panel, int64_t first, int64_t count, uint8_t *to);
typedef void packed_tile(const uint8_t *x, const uint8_t *panel, int64_t groups, float *out, int64_t rows);
typedef struct {
    packed_unpack *unpack;
    packed_tile *tile;
} packed_work;

INLINE int low_step(int kind, int j) { return kind == HALVES && j >= 2 ? j + 2 : j; }

INLINE int high_step(int kind, int j) { return low_step(kind, j) + (kind == HALVES ? 2 : 4); }

static const int8_t mxfp4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}; /* values and 12 */

TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#define V 16
#include "vectors.h"
typedef __m512i bytes_16;
INLINE bytes_16 load_16(const void *p) { return _mm512_loadu_si512(p); }
INLINE void store_16(void *p, bytes_16 x) { _mm512_storeu_si512(p, x); }
INLINE bytes_16 low_half_16(bytes_16 x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE bytes_16 high_half_16(bytes_16 x) { return low_half_16(_mm512_srli_epi16(x, 4)); }
INLINE bytes_16 pick_16(bytes_16 x) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)mxfp4)), x); }
INLINE bytes_16 with_bits_16(bytes_16 x, const uint8_t *mask, int bit) {
    uint64_t which;
    memcpy(&which, mask, sizeof which);
    return _mm512_mask_add_epi8(x, which, x, _mm512_set1_epi8(bit));
}
INLINE bits widen_16(const uint8_t *p) { return (bits)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE bits widen_signed_16(const uint8_t *p) { return (bits)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vec from_half_16(const uint8_t *p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vec floats_16(bits x) { return (vec)_mm512_cvtepi32_ps((__m512i)x); }
INLINE vec fused_16(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE bits spread_16(const uint8_t *p) { return (bits)_mm512_set1_epi32(*(const loose_int *)p); }
INLINE bits short_products_16(bits a, bits b) { return (bits)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
INLINE bits dot_16(int wide, bits sum, bytes_16 one, bytes_16 two, const uint8_t *x, const uint8_t *y) {
    (void)wide;
    return (bits)_mm512_dpbusd_epi32(_mm512_dpbusd_epi32((__m512i)sum, one, (__m512i)spread_16(x)), two, (__m512i)spread_16(y));
}
#include "packed_rows.h"
END_TARGET

TARGET("avx2,fma,f16c") /* there is no processor that has AVX2 and does not convert 16-bit floats */
#define V 8
#include "vectors.h"
typedef __m256i bytes_8;
INLINE bytes_8 load_8(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void store_8(void *p, bytes_8 x) { _mm256_storeu_si256((__m256i *)p, x); }
INLINE bytes_8 low_half_8(bytes_8 x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE bytes_8 high_half_8(bytes_8 x) { return low_half_8(_mm256_srli_epi16(x, 4)); }
INLINE bytes_8 pick_8(bytes_8 x) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)mxfp4)), x); }
INLINE bytes_8 with_bits_8(bytes_8 x, const uint8_t *mask, int bit) {
    const __m256i place = _mm256_set1_epi64x(0x8040201008040201), byte = _mm256_setr_epi64x(0, ONES, 2 * ONES, 3 * ONES);
    const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(*(const loose_int *)mask), byte), place);
    return _mm256_add_epi8(x, _mm256_and_si256(_mm256_cmpeq_epi8(own, place), _mm256_set1_epi8(bit)));
}
INLINE bits widen_8(const uint8_t *p) { return (bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE bits widen_signed_8(const uint8_t *p) { return (bits)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vec from_half_8(const uint8_t *p) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vec floats_8(bits x) { return (vec)_mm256_cvtepi32_ps((__m256i)x); }
INLINE vec fused_8(vec a, vec b, vec c) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE bits spread_8(const uint8_t *p) { return (bits)_mm256_set1_epi32(*(const loose_int *)p); }
INLINE bits short_products_8(bits a, bits b) { return (bits)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
/* Pairs of products are added in 16 bits: four of up to 63 * 127 fit; those of 8 bits are taken in halves. */
INLINE bits dot_8(int wide, bits sum, bytes_8 one, bytes_8 two, const uint8_t *x, const uint8_t *y) {
    const __m256i first = (__m256i)spread_8(x), second = (__m256i)spread_8(y);
    if (!wide) {
        const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(one, first), _mm256_maddubs_epi16(two, second));
        return sum + (bits)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    const __m256i low = _mm256_add_epi16(_mm256_maddubs_epi16(low_half_8(one), first), _mm256_maddubs_epi16(low_half_8(two), second));
    const __m256i high = _mm256_add_epi16(_mm256_maddubs_epi16(high_half_8(one), first), _mm256_maddubs_epi16(high_half_8(two), second));
    return sum + (bits)_mm256_madd_epi16(low, _mm256_set1_epi16(1)) + (bits)_mm256_madd_epi16(high, _mm256_set1_epi16(16));
}
#include "packed_rows.h"

/* Rounds a group: 32 numbers, the scale, and what the group's sum adds (see CENTRED and the others). */
static void round_group(const float *x, const packed_format *f, uint8_t *out) {
    const __m256i plain = _mm256_set1_epi32(INT32_MAX);
    __m256 part[4];
    __m256i most = _mm256_castps_si256(_mm256_set1_ps(LEAST_PEAK)); /* magnitudes compare as integers do, and NaN is the largest */
    for (int i = 0; i < 4; i++) {
        part[i] = _mm256_loadu_ps(x + 8 * i);
        most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(part[i]), plain));
    }
    most = _mm256_max_epi32(most, _mm256_permute2x128_si256(most, most, 1));
    most = _mm256_max_epi32(most, _mm256_shuffle_epi32(most, 0x4e));
    most = _mm256_max_epi32(most, _mm256_shuffle_epi32(most, 0xb1));
    const float peak = _mm256_cvtss_f32(_mm256_castsi256_ps(most)), scale = peak / LEVELS;
    const __m256 by = _mm256_set1_ps(LEVELS / peak);
    __m256i whole[4];
    for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(part[i], by));
    const __m256i narrow = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    const __m256i numbers = _mm256_permutevar8x32_epi32(narrow, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), numbers), _mm256_set1_epi16(1));
    int32_t sums[8];
    _mm256_storeu_si256((__m256i *)sums, fours);
    const int32_t low = sums[0] + sums[1] + sums[2] + sums[3], high = sums[4] + sums[5] + sums[6] + sums[7];
    _mm256_storeu_si256((__m256i *)out, numbers);
    memcpy(out + 32, &scale, 4);
    if (f->kind == HALVES) {
        const int32_t start[2] = {-f->zero * low, -f->zero * high};
        memcpy(out + 36, start, sizeof start);
    } else if (f->kind == ABOVE) {
        const float sum = low + high;
        memcpy(out + 36, &sum, 4);
    } else {
        const int32_t start = (f->kind == ZEROS ? -1 : -f->zero) * (low + high);
        memcpy(out + 36, &start, 4);
    }
}
END_TARGET

/* Rows from `x` on that pass the panels together, once they are rounded: [tiles][groups][rows of a tile][ROUNDED]. */
typedef struct {
    const float *x;
    int64_t x_stride, rows, tile_rows, few, groups, panel_bytes;
    const packed_format *format;
    uint8_t *rounded;
    packed_work work;
    packed_tile *tile; /* of unpacked groups */
    const afterglow_matrix *matrix;
    int add;
    float *out;
} product;

static void round_rows(const void *what, int64_t from, int64_t to, int worker) {
    const product job = *(const product *)what;
    const int64_t size = ROUNDED(job.format->kind);
    (void)worker;
    for (int64_t row = from; row < to; row++) {
        const int64_t first = row - row % job.tile_rows, rows = job.rows - first < job.tile_rows ? job.rows - first : job.tile_rows;
        uint8_t *out = job.rounded + (first * job.groups + row - first) * size;
        for (int64_t i = 0; i < job.groups; i++) round_group(job.x + row * job.x_stride + i * GROUP, job.format, out + i * rows * size);
    }
}

static void multiply_panels(const void *what, int64_t from, int64_t to, int worker) {
    const product job = *(const product *)what;
    const int64_t size = ROUNDED(job.format->kind), outputs = job.matrix->outputs;
    _Alignas(64) uint8_t unpacked[RUN * UNPACKED];
    _Alignas(64) float sums[CHUNK * PANEL];
    (void)worker;
    for (int64_t panel = from; panel < to; panel++) {
        const uint8_t *own = (const uint8_t *)job.matrix->panels + panel * job.panel_bytes;
        memset(sums, 0, job.rows * PANEL * sizeof *sums);
        if (job.rows <= job.few) job.work.tile(job.rounded, own, job.groups, sums, job.rows);
        for (int64_t i = 0; job.rows > job.few && i < job.groups; i += RUN) {
            const int64_t count = job.groups - i < RUN ? job.groups - i : RUN;
            job.work.unpack(own, i, count, unpacked);
            for (int64_t row = 0; row < job.rows; row += job.tile_rows) {
                const int64_t rows = job.rows - row < job.tile_rows ? job.rows - row : job.tile_rows;
                job.tile(job.rounded + (row * job.groups + i * rows) * size, unpacked, count, sums + row * PANEL, rows);
            }
        }
        const int64_t first = panel * PANEL, count = outputs - first < PANEL ? outputs - first : PANEL;
        const float *bias = job.matrix->terms ? job.matrix->terms + first : 0;
        for (int64_t row = 0; row < job.rows; row++) {
            float *to_row = job.out + row * outputs + first, *sum = sums + row * PANEL;
            for (int64_t o = 0; bias && o < count; o++) sum[o] += bias[o];
            for (int64_t o = 0; job.add && o < count; o++) sum[o] += to_row[o];
            memcpy(to_row, sum, count * sizeof *sum);
        }
    }
}

int afterglow_multiply_packed(const afterglow_matrix *matrix, const float *x, int64_t x_stride, int64_t rows, int add, float *out,
                              int threads, int width) {
    const int wide = width == 16 && afterglow_bytes();
    const packed_format *format = packed_formats + matrix->format;
    const int64_t most = rows < CHUNK ? rows : CHUNK, groups = matrix->inputs / GROUP, count = (matrix->outputs + PANEL - 1) / PANEL;
    const int64_t tile_most = wide ? ROWS : NARROW_ROWS, wake = matrix->outputs * matrix->inputs * (1 + rows / tile_most) >= NO_WAKE;
    product job = {.x_stride = x_stride, .few = wide ? FEW_ROWS : NARROW_FEW, .groups = groups, .format = format, .matrix = matrix, .add = add};
    job.panel_bytes = afterglow_panel_bytes(matrix->format, matrix->inputs);
    job.work = (wide ? work_16 : work_8)[matrix->format], job.tile = (wide ? tiles_16 : tiles_8)[format->kind];
    job.rounded = malloc(most * groups * ROUNDED(format->kind) + 1);
    if (!job.rounded) return 1;
    for (int64_t first = 0; first < rows; first += CHUNK) {
        job.x = x + first * x_stride, job.out = out + first * matrix->outputs;
        job.rows = rows - first < CHUNK ? rows - first : CHUNK;
        const int64_t tiles = (job.rows + tile_most - 1) / tile_most;
        job.tile_rows = (job.rows + tiles - 1) / tiles;
        team_share(round_rows, &job, job.rows, 16, threads, wake);
        team_share(multiply_panels, &job, count, 1 + count / (16 * threads), threads, wake);
    }
    free(job.rounded);
    return 0;
}
