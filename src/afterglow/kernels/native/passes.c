/* What happens to rows between products, in one pass over them each: rotation, norm, gated activation, rounding to 8 bits. Float32.

   Torch takes three to six operations for each, every one of which reads and writes all rows, and for a single row takes longer
   to be called than to run. Built and called as segments.c is. */

#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__)
#error "written for GCC on x86-64; elsewhere the package does without"
#endif

#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define ALONE 65536 /* numbers that one thread passes alone: to wake another takes about as long */
#define INLINE static inline __attribute__((always_inline))
#define JOIN(a, b) JOIN_(a, b)
#define JOIN_(a, b) a##_##b
#define NAME(x) JOIN(x, V)

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#define V 16
#include "vectors.h"
#include "passes.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define V 8
#include "vectors.h"
#include "passes.h"
#pragma GCC pop_options

static int enough(int threads, int64_t numbers) { return numbers / ALONE < threads - 1 ? 1 + numbers / ALONE : threads; }

/* out = x rotated: `heads` heads of `d` numbers, of which the first `dim` turn, in halves; rows and heads of x and out so many
   floats apart. cos and sin [rows][dim], sin with its sign. */
void afterglow_rotate_2(const float *x, int64_t x_row, int64_t x_head, const float *cos, const float *sin, float *out,
                        int64_t out_row, int64_t out_head, int64_t rows, int64_t heads, int64_t d, int64_t dim, int threads,
                        int width) {
#pragma omp parallel for num_threads(enough(threads, rows * heads * d)) schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const float *from = x + row * x_row + head * x_head;
            float *to = out + row * out_row + head * out_head;
            (width == 16 ? turn_16 : turn_8)(from, cos + row * dim, sin + row * dim, to, dim);
            memcpy(to + dim, from + dim, (d - dim) * sizeof *to);
        }
}

/* out [rows][n] = x / sqrt(mean(x^2) + eps) * weight. */
void afterglow_rms_norm_2(const float *x, int64_t x_row, const float *weight, float eps, float *out, int64_t rows, int64_t n,
                          int threads, int width) {
#pragma omp parallel for num_threads(enough(threads, rows * n)) schedule(static)
    for (int64_t row = 0; row < rows; row++)
        (width == 16 ? norm_16 : norm_8)(x + row * x_row, weight, eps, out + row * n, n);
}

/* Each row of x as scale[row] times (out [row][n] less levels + 1), rounded to numbers up to 2 levels + 1. */
void afterglow_round_2(const float *x, int64_t x_row, int levels, uint8_t *out, float *scale, int64_t rows, int64_t n, int threads,
                       int width) {
#pragma omp parallel for num_threads(enough(threads, rows * n)) schedule(static)
    for (int64_t row = 0; row < rows; row++)
        scale[row] = (width == 16 ? rounded_16 : rounded_8)(x + row * x_row, levels, out + row * n, n);
}

/* out [rows][n] = silu(x[..][0 .. n)) * x[..][n .. 2 n). */
void afterglow_gated_silu_2(const float *x, int64_t x_row, float *out, int64_t rows, int64_t n, int threads, int width) {
#pragma omp parallel for num_threads(enough(threads, rows * n)) schedule(static)
    for (int64_t row = 0; row < rows; row++)
        (width == 16 ? gated_16 : gated_8)(x + row * x_row, x + row * x_row + n, out + row * n, n);
}
