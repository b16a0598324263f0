/* Products of rows with a matrix, float32: as fast as memory is read for a dozen rows, and as fast as can be multiplied beyond.

   The matrix is kept in panels of as many outputs as two vectors have lanes, inputs one after another, so that a panel is read
   in one run, and a tile of rows by a panel stays in registers. Each number is summed up in the same order whatever
   other rows there are: a row's product does not depend on its batch.

   Built and called as segments.c is. */

#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__)
#error "written for GCC on x86-64; elsewhere the package does without"
#endif

#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define AHEAD 1024  /* floats of a panel that are asked for ahead of time (8 rows of 768 inputs: 0.48 to 0.35 ms) */
#define RUN 512     /* inputs that are added up before they meet the sum of those before: errors stay small */
#define CHUNK 240   /* rows that pass a panel before the next one's turn: they stay in the third cache */
#define ALONE 65536 /* to wake a thread takes about as long as so many products */
#define MOST_ROWS 12
#define INLINE static inline __attribute__((always_inline))
#define JOIN(a, b) JOIN_(a, b)
#define JOIN_(a, b) a##_##b
#define NAME(x) JOIN(x, V)

/* out[row][0 .. 2 V) = bias + x[row] . panel, for `rows` rows, `x_stride` and `out_stride` floats apart. */
typedef void tile(const float *x, int64_t x_stride, const float *panel, int64_t inputs, const float *bias, float *out,
                  int64_t out_stride, int64_t rows);

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#define V 16
#include "vectors.h"
#include "panel.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define V 8
#include "vectors.h"
#include "panel.h"
#pragma GCC pop_options

/* out [rows][outputs] = x [rows][inputs] (rows `x_stride` floats apart) times the matrix in `panels`
   [outputs / (2 width), rounded up][inputs][2 width], plus `bias`, which has as many numbers as the panels have outputs, or is
   null. Returns 0, or 1 where there was no memory. */
int afterglow_multiply_2(const float *x, int64_t x_stride, int64_t rows, int64_t inputs, const float *panels, int64_t outputs,
                         const float *bias, float *out, int threads, int width) {
    tile *some = width == 16 ? some_16 : some_8;
    const int64_t most = width == 16 ? MOST_ROWS : MOST_ROWS / 2, lanes = 2 * width, count = (outputs + lanes - 1) / lanes;
    const int64_t effort = count * lanes * inputs * (1 + rows / most) / ALONE;
    if (effort < threads - 1) threads = 1 + effort;
    /* Rows a multiple of 4 KiB apart would all fall into the same few places of the first cache. */
    const int64_t apart = inputs + width, copied = rows > 1 && x_stride % 1024 == 0 ? (rows < CHUNK ? rows : CHUNK) : 0;
    float *copy = copied ? malloc(copied * apart * sizeof *copy) : 0;
    if (copied && !copy) return 1;
    const int64_t step = 1 + count / (16 * threads);
#pragma omp parallel num_threads(threads)
    for (int64_t first = 0; first < rows; first += CHUNK) {
        const int64_t n = rows - first < CHUNK ? rows - first : CHUNK, tiles = (n + most - 1) / most, size = (n + tiles - 1) / tiles;
        const float *from = x + first * x_stride;
        int64_t stride = x_stride;
        if (copied) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < n; row++) memcpy(copy + row * apart, from + row * x_stride, inputs * sizeof *x);
            from = copy, stride = apart;
        }
#pragma omp for schedule(dynamic, step)
        for (int64_t p = 0; p < count; p++) {
            const float *panel = panels + p * inputs * lanes, *add = bias ? bias + p * lanes : 0;
            const int64_t left = outputs - p * lanes;
            for (int64_t row = 0; row < n; row += size) {
                const int64_t these = n - row < size ? n - row : size;
                float *to = out + (first + row) * outputs + p * lanes, edge[MOST_ROWS * 2 * 16];
                if (left >= lanes) {
                    some(from + row * stride, stride, panel, inputs, add, to, outputs, these);
                    continue;
                }
                some(from + row * stride, stride, panel, inputs, add, edge, lanes, these);
                for (int64_t i = 0; i < these; i++) memcpy(to + i * outputs, edge + i * lanes, left * sizeof *to);
            }
        }
    }
    free(copy);
    return 0;
}
