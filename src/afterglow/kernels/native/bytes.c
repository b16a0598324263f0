/* Products of rows with a matrix in 8 bits, sums in 32: on processors that multiply four pairs of bytes at once (AVX-512 VNNI).

   Laid out and walked through as matrix.c does it, with four inputs of an output side by side. Rows are rounded here, each with a
   scale of its own, to unsigned numbers around 128; what 128 adds to every sum is known beforehand. Sums are whole numbers, so
   that a row's product does not depend on its batch.

   Built and called as segments.c is. */

#include "team.h"

#include "functions.h"

#include <float.h>
#include <immintrin.h>
#include <math.h>

#define LANES 32
#define ROWS 12
#define CHUNK 240   /* as in matrix.c */
#define AHEAD 4096  /* bytes of a panel that are asked for ahead of time */
#define ALONE 262144
#define LEVELS 127
typedef float __attribute__((may_alias, aligned(1))) loose;
typedef int32_t ints __attribute__((vector_size(64)));

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")

/* x as scale times (out - 128). Returns the scale. */
static float rounded(const float *x, uint8_t *out, int64_t n) {
    const int64_t whole = n / 16 * 16;
    const __mmask16 rest = (1u << (n - whole)) - 1;
    __m512 most = _mm512_abs_ps(_mm512_maskz_loadu_ps(rest, x + whole));
    for (int64_t i = 0; i < whole; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
    float peak = _mm512_reduce_max_ps(most);
    const float scale = (peak > FLT_MIN ? peak : FLT_MIN) / LEVELS;
    const __m512 by = _mm512_set1_ps(scale), zero = _mm512_set1_ps(LEVELS + 1.5f); /* all positive, so that cutting off rounds */
    for (int64_t i = 0; i < whole; i += 16) {
        const __m512i number = _mm512_cvttps_epi32(_mm512_add_ps(_mm512_div_ps(_mm512_loadu_ps(x + i), by), zero));
        _mm_storeu_si128((__m128i *)(out + i), _mm512_cvtepi32_epi8(number));
    }
    const __m512 last = _mm512_maskz_loadu_ps(rest, x + whole);
    const __m512i number = _mm512_cvttps_epi32(_mm512_add_ps(_mm512_div_ps(last, by), zero));
    _mm512_mask_cvtepi32_storeu_epi8(out + whole, rest, number);
    return scale;
}

/* For `rows` rows, a constant. `factor`: what 128 adds up to [LANES], as int32, then scales and bias of the outputs. */
INLINE void tile(const uint8_t *x, int64_t x_stride, const float *x_scale, const int8_t *panel, int64_t steps, const float *factor,
                 int more, float *out, int64_t out_stride, int rows) {
    ints low_sum[ROWS], high_sum[ROWS];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) low_sum[row] = high_sum[row] = (ints){0};
    for (int64_t i = 0; i < steps; i++) {
        const __m512i low = _mm512_loadu_si512(panel + i * LANES * 4), high = _mm512_loadu_si512(panel + i * LANES * 4 + 64);
        __builtin_prefetch(panel + i * LANES * 4 + AHEAD, 0, 3);
        __builtin_prefetch(panel + i * LANES * 4 + AHEAD + 64, 0, 3);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            const __m512i numbers = _mm512_castps_si512(_mm512_set1_ps(*(const loose *)(x + row * x_stride + i * 4)));
            low_sum[row] = (ints)_mm512_dpbusd_epi32((__m512i)low_sum[row], numbers, low);
            high_sum[row] = (ints)_mm512_dpbusd_epi32((__m512i)high_sum[row], numbers, high);
        }
    }
    const __m512i low_zero = _mm512_loadu_si512(factor), high_zero = _mm512_loadu_si512(factor + 16);
    const __m512 low_scale = _mm512_loadu_ps(factor + LANES), high_scale = _mm512_loadu_ps(factor + LANES + 16);
    const __m512 low_bias = _mm512_loadu_ps(factor + 2 * LANES), high_bias = _mm512_loadu_ps(factor + 2 * LANES + 16);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        const __m512 scale = _mm512_set1_ps(x_scale[row]);
        float *to = out + row * out_stride;
        const __m512 low = _mm512_cvtepi32_ps(_mm512_sub_epi32((__m512i)low_sum[row], low_zero));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_sub_epi32((__m512i)high_sum[row], high_zero));
        const __m512 low_out = _mm512_fmadd_ps(low, _mm512_mul_ps(low_scale, scale), low_bias);
        const __m512 high_out = _mm512_fmadd_ps(high, _mm512_mul_ps(high_scale, scale), high_bias);
        _mm512_storeu_ps(to, more ? _mm512_add_ps(low_out, _mm512_loadu_ps(to)) : low_out);
        _mm512_storeu_ps(to + 16, more ? _mm512_add_ps(high_out, _mm512_loadu_ps(to + 16)) : high_out);
    }
}

static void some(const uint8_t *x, int64_t x_stride, const float *x_scale, const int8_t *panel, int64_t steps, const float *factor,
                 int more, float *out, int64_t out_stride, int64_t rows) {
#define CASE(n) \
    case n: tile(x, x_stride, x_scale, panel, steps, factor, more, out, out_stride, n); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

#pragma GCC pop_options

/* Whether this processor can. */
int afterglow_bytes_3(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

/* Rows from `x` on that pass the panels together, once they are rounded. */
typedef struct {
    const float *x;
    int64_t x_stride, rows, size; /* `size` of them in a tile */
    float *scale;
    uint8_t *numbers;
    int64_t inputs, steps, stride;
    const int8_t *panels;
    const float *factors;
    int more;
    float *out;
    int64_t outputs;
} passing;

static void rounded_rows(const void *what, int64_t from, int64_t to, int desk) {
    const passing *p = what;
    (void)desk;
    for (int64_t row = from; row < to; row++) {
        p->scale[row] = rounded(p->x + row * p->x_stride, p->numbers + row * p->stride, p->inputs);
        memset(p->numbers + row * p->stride + p->inputs, 0, p->steps * 4 - p->inputs);
    }
}

static void passed(const void *what, int64_t from, int64_t to, int desk) {
    const passing p = *(const passing *)what;
    (void)desk;
    for (int64_t i = from; i < to; i++) {
        const int8_t *panel = p.panels + i * p.steps * LANES * 4;
        const float *factor = p.factors + i * 3 * LANES;
        const int64_t left = p.outputs - i * LANES;
        for (int64_t row = 0; row < p.rows; row += p.size) {
            const int64_t rows = p.rows - row < p.size ? p.rows - row : p.size;
            float *out = p.out + row * p.outputs + i * LANES, edge[ROWS * LANES];
            for (int64_t j = 0; p.more && left < LANES && j < rows; j++) memcpy(edge + j * LANES, out + j * p.outputs, left * sizeof *out);
            some(p.numbers + row * p.stride, p.stride, p.scale + row, panel, p.steps, factor, p.more, left < LANES ? edge : out,
                 left < LANES ? LANES : p.outputs, rows);
            if (left < LANES)
                for (int64_t j = 0; j < rows; j++) memcpy(out + j * p.outputs, edge + j * LANES, left * sizeof *out);
        }
    }
}

/* out [rows][outputs] = x [rows][inputs] (rows `x_stride` floats apart) times the matrix in `panels`
   [outputs / 32, rounded up][inputs / 4, rounded up][32][4]; `factors` [panels][3][32], see `tile`; plus what `out` has been
   before, where `more` is not 0. Returns 0, or 1 where there was no memory. */
int afterglow_multiply_bytes_3(const float *x, int64_t x_stride, int64_t rows, int64_t inputs, const int8_t *panels,
                               int64_t outputs, const float *factors, int more, float *out, int threads) {
    const int64_t steps = (inputs + 3) / 4, count = (outputs + LANES - 1) / LANES, most = rows < CHUNK ? rows : CHUNK;
    const int worth = count * LANES * inputs * (1 + rows / ROWS) >= ALONE;
    passing p = {.x_stride = x_stride, .inputs = inputs, .steps = steps, .stride = (steps * 4 + 63) / 64 * 64 + 64};
    p.panels = panels, p.factors = factors, p.outputs = outputs, p.more = more;
    p.scale = malloc(most * (sizeof *p.scale + p.stride));
    if (!p.scale) return 1;
    p.numbers = (uint8_t *)(p.scale + most);
    for (int64_t first = 0; first < rows; first += CHUNK) {
        p.x = x + first * x_stride, p.out = out + first * outputs, p.rows = rows - first < CHUNK ? rows - first : CHUNK;
        const int64_t tiles = (p.rows + ROWS - 1) / ROWS;
        p.size = (p.rows + tiles - 1) / tiles;
        team_share(rounded_rows, &p, p.rows, 16, threads, worth);
        team_share(passed, &p, count, 1 + count / (16 * threads), threads, worth);
    }
    free(p.scale);
    return 0;
}
