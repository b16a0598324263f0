/* Rows of weights, as a checkpoint has them, rounded to blocks of 32: Q8_0 and Q4_0, as block_rounding.py says how.

   Eight blocks go side by side, one in each lane of a vector.

   Built and called as segments.c is. */

#include "team.h"

#include <immintrin.h>

#define GROUP 32
#define SIDE 8 /* blocks side by side */
#define NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define STEPS 9
#define STEP 0.1f

TARGET("avx2,fma,f16c")

typedef float lanes[SIDE];

INLINE float number(const void *row, int64_t kind, int64_t i) {
    uint32_t bits;
    float x;
    if (kind == AFTERGLOW_FLOAT32) return ((const float *)row)[i];
    if (kind == AFTERGLOW_FLOAT16) return _cvtsh_ss(((const uint16_t *)row)[i]);
    bits = (uint32_t)((const uint16_t *)row)[i] << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns the scale that is best for each lane. */
static __m256 search(const lanes *x) {
    const __m256 sign = _mm256_set1_ps(-0.0f), least = _mm256_set1_ps(-8), most = _mm256_set1_ps(7), one = _mm256_set1_ps(1);
    __m256 peak = _mm256_setzero_ps(), magnitude = peak, best = _mm256_set1_ps(-1), scale = peak;
    for (int i = 0; i < GROUP; i++) {
        const __m256 at = _mm256_loadu_ps(x[i]), size = _mm256_andnot_ps(sign, at);
        peak = _mm256_blendv_ps(peak, at, _mm256_cmp_ps(size, magnitude, _CMP_GT_OQ));
        magnitude = _mm256_max_ps(magnitude, size);
    }
    peak = _mm256_blendv_ps(peak, one, _mm256_cmp_ps(magnitude, _mm256_setzero_ps(), _CMP_EQ_OQ));
    for (int step = -STEPS; step <= STEPS; step++) {
        const __m256 by = _mm256_div_ps(_mm256_set1_ps(-(8 + STEP * step)), peak);
        __m256 products = _mm256_setzero_ps(), squares = products;
        for (int i = 0; i < GROUP; i++) {
            const __m256 at = _mm256_loadu_ps(x[i]);
            const __m256 level = _mm256_min_ps(_mm256_max_ps(_mm256_round_ps(_mm256_mul_ps(at, by), NEAREST), least), most);
            products = _mm256_fmadd_ps(at, level, products);
            squares = _mm256_fmadd_ps(level, level, squares);
        }
        const __m256 fit = _mm256_div_ps(products, _mm256_max_ps(squares, one)), gain = _mm256_mul_ps(products, fit);
        const __m256 better = _mm256_cmp_ps(gain, best, _CMP_GT_OQ);
        best = _mm256_blendv_ps(best, gain, better);
        scale = _mm256_blendv_ps(scale, fit, better);
    }
    return scale;
}

/* Returns the scale that makes the largest number of each lane 127. */
static __m256 largest(const lanes *x) {
    __m256 most = _mm256_setzero_ps();
    for (int i = 0; i < GROUP; i++) most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(x[i])));
    return _mm256_div_ps(most, _mm256_set1_ps(127));
}

/* Writes up to SIDE blocks, from block `first` of a row on, to `out`. */
static void round_side(const void *row, int64_t kind, int64_t first, int64_t count, int64_t bits, uint8_t *out) {
    lanes x[GROUP] = {{0}};
    int32_t levels[GROUP][SIDE];
    uint16_t half[SIDE];
    for (int64_t j = 0; j < count; j++)
        for (int i = 0; i < GROUP; i++) x[i][j] = number(row, kind, (first + j) * GROUP + i);
    const __m128i narrow = _mm256_cvtps_ph(bits == 4 ? search(x) : largest(x), NEAREST);
    const __m256 scale = _mm256_cvtph_ps(narrow), used = _mm256_cmp_ps(scale, _mm256_setzero_ps(), _CMP_NEQ_OQ);
    const __m256 least = _mm256_set1_ps(bits == 4 ? -8 : -127), most = _mm256_set1_ps(bits == 4 ? 7 : 127);
    _mm_storeu_si128((__m128i *)half, narrow);
    for (int i = 0; i < GROUP; i++) {
        const __m256 level = _mm256_and_ps(_mm256_div_ps(_mm256_loadu_ps(x[i]), scale), used);
        _mm256_storeu_si256((__m256i *)levels[i], _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(level, least), most)));
    }
    for (int64_t j = 0; j < count; j++) {
        uint8_t *block = out + j * (2 + GROUP * bits / 8);
        memcpy(block, half + j, 2);
        if (bits == 8)
            for (int i = 0; i < GROUP; i++) block[2 + i] = levels[i][j];
        else
            for (int i = 0; i < GROUP / 2; i++) block[2 + i] = (levels[i][j] + 8) | (levels[i + GROUP / 2][j] + 8) << 4;
    }
}

END_TARGET

typedef struct {
    const afterglow_rows *rows;
    int64_t bits;
    uint8_t *out;
} rounding;

static void round_rows(const void *what, int64_t from, int64_t to, int worker) {
    const rounding *job = what;
    const afterglow_rows *rows = job->rows;
    const int64_t blocks = rows->size / GROUP, block_bytes = 2 + GROUP * job->bits / 8;
    (void)worker;
    for (int64_t i = from; i < to; i++) {
        const void *row = (const char *)rows->data + i * rows->size * (rows->kind == AFTERGLOW_FLOAT32 ? 4 : 2);
        for (int64_t first = 0; first < blocks; first += SIDE)
            round_side(row, rows->kind, first, blocks - first < SIDE ? blocks - first : SIDE, job->bits,
                       job->out + (i * blocks + first) * block_bytes);
    }
}

void afterglow_round_blocks(const afterglow_rows *rows, int64_t bits, uint8_t *out, int threads) {
    const rounding job = {.rows = rows, .bits = bits, .out = out};
    team_share(round_rows, &job, rows->rows, 8, threads, 1);
}
