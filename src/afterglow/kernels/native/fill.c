/* Rows of weights, as a checkpoint has them, rounded to bytes in panels: read once, and no other copy is made.

   Built and called as segments.c is. */

#include "team.h"

#include <float.h>
#include <immintrin.h>

#define LANES 32
#define RUN 64 /* inputs of a panel that are rounded, then written side by side */
#define LEVELS 127
typedef uint32_t __attribute__((may_alias, aligned(1))) loose;

TARGET(AVX512)

/* Returns up to 16 numbers from element `i` of a row on. */
INLINE __m512 numbers(const void *row, int64_t kind, int64_t i, __mmask16 which) {
    if (kind == AFTERGLOW_FLOAT32) return _mm512_maskz_loadu_ps(which, (const float *)row + i);
    const __m256i half = _mm256_maskz_loadu_epi16(which, (const uint16_t *)row + i);
    if (kind == AFTERGLOW_FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE __mmask16 mask(int64_t left) { return left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0; }

static float scale_of(const void *row, int64_t kind, int64_t size) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(numbers(row, kind, i, mask(size - i))));
    const float peak = _mm512_reduce_max_ps(most);
    return (peak > FLT_MIN ? peak : FLT_MIN) / LEVELS;
}

/* Rounds RUN numbers from `i` on, zeros behind the last, and returns their sum. */
static int32_t round_run(const void *row, int64_t kind, int64_t i, int64_t size, float scale, int8_t *out) {
    __m512i sum = _mm512_setzero_si512();
    const __m512 by = _mm512_set1_ps(scale);
    for (int64_t j = 0; j < RUN; j += 16) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_div_ps(numbers(row, kind, i + j, mask(size - i - j)), by)); /* ties to even */
        sum = _mm512_add_epi32(sum, rounded);
        _mm_storeu_si128((__m128i *)(out + j), _mm512_cvtepi32_epi8(rounded));
    }
    return _mm512_reduce_add_epi32(sum);
}

END_TARGET

typedef struct {
    const afterglow_rows *rows;
    int64_t start;
    int8_t *panels;
    float *terms;
} filling;

static const void *row_at(const afterglow_rows *rows, int64_t i) {
    return (const char *)rows->data + i * rows->size * (rows->kind == AFTERGLOW_FLOAT32 ? 4 : 2);
}

static void fill_panels(const void *what, int64_t from, int64_t to, int worker) {
    const filling *job = what;
    const afterglow_rows *rows = job->rows;
    const int64_t size = rows->size, steps = (size + 3) / 4;
    (void)worker;
    for (int64_t i = job->start / LANES + from; i < job->start / LANES + to; i++) {
        const int64_t row = i * LANES - job->start; /* of the panel's first lane */
        const int64_t first = row < 0 ? -row : 0, last = row + LANES > rows->rows ? rows->rows - row : LANES;
        float *terms = job->terms + i * 3 * LANES;
        int32_t sums[LANES] = {0};
        int8_t run[LANES][RUN];
        for (int64_t lane = first; lane < last; lane++) terms[LANES + lane] = scale_of(row_at(rows, row + lane), rows->kind, size);
        for (int64_t begin = 0; begin < size; begin += RUN) {
            for (int64_t lane = first; lane < last; lane++)
                sums[lane] += round_run(row_at(rows, row + lane), rows->kind, begin, size, terms[LANES + lane], run[lane]);
            const int64_t count = steps - begin / 4 < RUN / 4 ? steps - begin / 4 : RUN / 4;
            loose *to = (loose *)(job->panels + (i * steps + begin / 4) * LANES * 4);
            for (int64_t step = 0; step < count; step++)
                for (int64_t lane = first; lane < last; lane++) to[step * LANES + lane] = *(const loose *)(run[lane] + step * 4);
        }
        for (int64_t lane = first; lane < last; lane++) {
            const int32_t added = 128 * sums[lane];
            memcpy(terms + lane, &added, sizeof added);
        }
    }
}

void afterglow_fill_bytes(const afterglow_rows *rows, int64_t start, void *panels, float *terms, int threads) {
    const filling job = {.rows = rows, .start = start, .panels = panels, .terms = terms};
    if (rows->rows > 0) team_share(fill_panels, &job, (start + rows->rows - 1) / LANES - start / LANES + 1, 1, threads, 1);
}
