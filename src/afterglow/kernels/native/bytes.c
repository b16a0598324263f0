/* Products of rows with a matrix in 8 bits, sums in 32: on processors that multiply four pairs of bytes at once (AVX-512 VNNI).

   Laid out and walked through as matrix.c does it, with four inputs of an output side by side. Rows are rounded here, each with a
   scale of its own, to unsigned numbers around 128; what 128 adds to every sum is known beforehand. Sums are whole numbers, so
   that a row's product does not depend on its batch.

   Built and called as segments.c is. */

#include "team.h"

#include <float.h>
#include <immintrin.h>
#include <math.h>

#define LANES 32
#define ROWS 12
#define CHUNK 240   /* as in matrix.c */
#define AHEAD 4096  /* bytes of a panel that are asked for ahead of time */
#define NO_WAKE 262144 /* products */
#define LEVELS 127
typedef float __attribute__((may_alias, aligned(1))) loose;
typedef int32_t ints __attribute__((vector_size(64)));

TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")

/* Rounds x to scale * (out - 128). Returns the scale. */
static float round_row(const float *x, uint8_t *out, int64_t n) {
    const int64_t whole = n / 16 * 16;
    const __mmask16 rest = (1u << (n - whole)) - 1;
    const __m512i plain = _mm512_set1_epi32(INT32_MAX); /* magnitudes compare as integers do, and NaN is the largest */
    __m512i most = _mm512_and_si512(_mm512_maskz_loadu_epi32(rest, x + whole), plain);
    for (int64_t i = 0; i < whole; i += 16) most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), plain));
    const int32_t bits = _mm512_reduce_max_epi32(most);
    float peak;
    memcpy(&peak, &bits, sizeof peak);
    const float scale = (peak < FLT_MIN ? FLT_MIN : peak) / LEVELS;
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

/* For `rows` rows, a constant. `terms`: see afterglow_matrix. */
INLINE void tile(const uint8_t *x, int64_t x_stride, const float *x_scale, const int8_t *panel, int64_t steps, const float *terms,
                 int add, float *out, int64_t out_stride, int rows) {
    ints low_sum[ROWS], high_sum[ROWS];
UNROLL(12)
    for (int row = 0; row < rows; row++) low_sum[row] = high_sum[row] = (ints){0};
    for (int64_t i = 0; i < steps; i++) {
        const __m512i low = _mm512_loadu_si512(panel + i * LANES * 4), high = _mm512_loadu_si512(panel + i * LANES * 4 + 64);
        __builtin_prefetch(panel + i * LANES * 4 + AHEAD, 0, 3);
        __builtin_prefetch(panel + i * LANES * 4 + AHEAD + 64, 0, 3);
UNROLL(12)
        for (int row = 0; row < rows; row++) {
            const __m512i numbers = _mm512_castps_si512(_mm512_set1_ps(*(const loose *)(x + row * x_stride + i * 4)));
            low_sum[row] = (ints)_mm512_dpbusd_epi32((__m512i)low_sum[row], numbers, low);
            high_sum[row] = (ints)_mm512_dpbusd_epi32((__m512i)high_sum[row], numbers, high);
        }
    }
    const __m512i low_zero = _mm512_loadu_si512(terms), high_zero = _mm512_loadu_si512(terms + 16);
    const __m512 low_scale = _mm512_loadu_ps(terms + LANES), high_scale = _mm512_loadu_ps(terms + LANES + 16);
    const __m512 low_bias = _mm512_loadu_ps(terms + 2 * LANES), high_bias = _mm512_loadu_ps(terms + 2 * LANES + 16);
UNROLL(12)
    for (int row = 0; row < rows; row++) {
        const __m512 scale = _mm512_set1_ps(x_scale[row]);
        float *to = out + row * out_stride;
        const __m512 low = _mm512_cvtepi32_ps(_mm512_sub_epi32((__m512i)low_sum[row], low_zero));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_sub_epi32((__m512i)high_sum[row], high_zero));
        const __m512 low_out = _mm512_fmadd_ps(low, _mm512_mul_ps(low_scale, scale), low_bias);
        const __m512 high_out = _mm512_fmadd_ps(high, _mm512_mul_ps(high_scale, scale), high_bias);
        _mm512_storeu_ps(to, add ? _mm512_add_ps(low_out, _mm512_loadu_ps(to)) : low_out);
        _mm512_storeu_ps(to + 16, add ? _mm512_add_ps(high_out, _mm512_loadu_ps(to + 16)) : high_out);
    }
}

static void multiply_tile(const uint8_t *x, int64_t x_stride, const float *x_scale, const int8_t *panel, int64_t steps, const float *terms,
                 int add, float *out, int64_t out_stride, int64_t rows) {
#define CASE(n) \
    case n: tile(x, x_stride, x_scale, panel, steps, terms, add, out, out_stride, n); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

END_TARGET

int afterglow_bytes(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

/* Rows from `x` on that pass the panels together, once they are rounded. */
typedef struct {
    const float *x;
    int64_t x_stride, rows, tile_rows;
    float *scales;
    uint8_t *numbers;
    int64_t steps, number_stride;
    const afterglow_matrix *matrix;
    int add;
    float *out;
} product;

static void round_rows(const void *what, int64_t from, int64_t to, int worker) {
    const product *job = what;
    const int64_t inputs = job->matrix->inputs;
    (void)worker;
    for (int64_t row = from; row < to; row++) {
        uint8_t *numbers = job->numbers + row * job->number_stride;
        job->scales[row] = round_row(job->x + row * job->x_stride, numbers, inputs);
        memset(numbers + inputs, 0, job->steps * 4 - inputs);
    }
}

static void multiply_panels(const void *what, int64_t from, int64_t to, int worker) {
    const product job = *(const product *)what;
    const int64_t outputs = job.matrix->outputs;
    (void)worker;
    for (int64_t i = from; i < to; i++) {
        const int8_t *panel = (const int8_t *)job.matrix->panels + i * job.steps * LANES * 4;
        const float *terms = job.matrix->terms + i * 3 * LANES;
        const int64_t left = outputs - i * LANES;
        for (int64_t row = 0; row < job.rows; row += job.tile_rows) {
            const int64_t rows = job.rows - row < job.tile_rows ? job.rows - row : job.tile_rows;
            float *out = job.out + row * outputs + i * LANES, edge[ROWS * LANES];
            for (int64_t j = 0; job.add && left < LANES && j < rows; j++) memcpy(edge + j * LANES, out + j * outputs, left * sizeof *out);
            multiply_tile(job.numbers + row * job.number_stride, job.number_stride, job.scales + row, panel, job.steps, terms, job.add,
                          left < LANES ? edge : out, left < LANES ? LANES : outputs, rows);
            if (left < LANES)
                for (int64_t j = 0; j < rows; j++) memcpy(out + j * outputs, edge + j * LANES, left * sizeof *out);
        }
    }
}

int afterglow_multiply_bytes(const afterglow_matrix *matrix, const float *x, int64_t x_stride, int64_t rows, int add, float *out,
                             int threads) {
    const int64_t steps = (matrix->inputs + 3) / 4, count = (matrix->outputs + LANES - 1) / LANES, most = rows < CHUNK ? rows : CHUNK;
    const int wake = count * LANES * matrix->inputs * (1 + rows / ROWS) >= NO_WAKE;
    product job = {.x_stride = x_stride, .steps = steps, .number_stride = (steps * 4 + 63) / 64 * 64 + 64, .matrix = matrix, .add = add};
    job.scales = malloc(most * (sizeof *job.scales + job.number_stride));
    if (!job.scales) return 1;
    job.numbers = (uint8_t *)(job.scales + most);
    for (int64_t first = 0; first < rows; first += CHUNK) {
        job.x = x + first * x_stride, job.out = out + first * matrix->outputs;
        job.rows = rows - first < CHUNK ? rows - first : CHUNK;
        const int64_t tiles = (job.rows + ROWS - 1) / ROWS;
        job.tile_rows = (job.rows + tiles - 1) / tiles;
        team_share(round_rows, &job, job.rows, 16, threads, wake);
        team_share(multiply_panels, &job, count, 1 + count / (16 * threads), threads, wake);
    }
    free(job.scales);
    return 0;
}
