/* What happens to rows between products, in one pass over them each: rotation, norm, gated activation, rounding to 8 bits. Float32.

   Torch takes three to six operations for each, every one of which reads and writes all rows, and for a single row takes longer
   to be called than to run. Built and called as segments.c is. */

#include "team.h"

#include "functions.h"

#include <float.h>
#include <math.h>

#define ALONE 65536 /* numbers that nobody is woken for */
#define PIECE 8192  /* numbers that one thread passes at a time */

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

/* Rows that are passed one by one; what the members mean, the functions below say. */
typedef struct {
    const float *x, *by, *cos, *sin;
    int64_t x_row, x_head, out_row, out_head, n, heads, dim;
    void *out;
    float *scale, eps;
    int levels, wide;
} rows;

/* `numbers` in all, in rows. */
static void pass(work *call, const rows *p, int64_t count, int64_t numbers, int threads) {
    team_share(call, p, count, numbers < PIECE ? count : 1 + count * PIECE / numbers, threads, numbers >= ALONE);
}

static void turned(const void *what, int64_t from, int64_t to, int desk) {
    const rows *p = what;
    (void)desk;
    for (int64_t row = from; row < to; row++)
        for (int64_t head = 0; head < p->heads; head++) {
            const float *x = p->x + row * p->x_row + head * p->x_head;
            float *out = (float *)p->out + row * p->out_row + head * p->out_head;
            (p->wide ? turn_16 : turn_8)(x, p->cos + row * p->dim, p->sin + row * p->dim, out, p->dim);
            memcpy(out + p->dim, x + p->dim, (p->n - p->dim) * sizeof *out);
        }
}

/* out = x rotated: `heads` heads of `d` numbers, of which the first `dim` turn, in halves; rows and heads of x and out so many
   floats apart. cos and sin [count][dim], sin with its sign. */
void afterglow_rotate_3(const float *x, int64_t x_row, int64_t x_head, const float *cos, const float *sin, float *out,
                        int64_t out_row, int64_t out_head, int64_t count, int64_t heads, int64_t d, int64_t dim, int threads,
                        int width) {
    const rows p = {.x = x, .x_row = x_row, .x_head = x_head, .cos = cos, .sin = sin, .out = out, .out_row = out_row,
                    .out_head = out_head, .heads = heads, .n = d, .dim = dim, .wide = width == 16};
    pass(turned, &p, count, count * heads * d, threads);
}

static void normed(const void *what, int64_t from, int64_t to, int desk) {
    const rows *p = what;
    (void)desk;
    for (int64_t row = from; row < to; row++)
        (p->wide ? norm_16 : norm_8)(p->x + row * p->x_row, p->by, p->eps, (float *)p->out + row * p->n, p->n);
}

/* out [count][n] = x / sqrt(mean(x^2) + eps) * weight. */
void afterglow_rms_norm_3(const float *x, int64_t x_row, const float *weight, float eps, float *out, int64_t count, int64_t n,
                          int threads, int width) {
    const rows p = {.x = x, .x_row = x_row, .by = weight, .eps = eps, .out = out, .n = n, .wide = width == 16};
    pass(normed, &p, count, count * n, threads);
}

static void narrowed(const void *what, int64_t from, int64_t to, int desk) {
    const rows *p = what;
    (void)desk;
    for (int64_t row = from; row < to; row++)
        p->scale[row] = (p->wide ? rounded_16 : rounded_8)(p->x + row * p->x_row, p->levels, (uint8_t *)p->out + row * p->n, p->n);
}

/* Each row of x as scale[row] times (out [row][n] less levels + 1), rounded to numbers up to 2 levels + 1. */
void afterglow_round_3(const float *x, int64_t x_row, int levels, uint8_t *out, float *scale, int64_t count, int64_t n, int threads,
                       int width) {
    const rows p = {.x = x, .x_row = x_row, .levels = levels, .out = out, .scale = scale, .n = n, .wide = width == 16};
    pass(narrowed, &p, count, count * n, threads);
}

static void gated_rows(const void *what, int64_t from, int64_t to, int desk) {
    const rows *p = what;
    (void)desk;
    for (int64_t row = from; row < to; row++) {
        const float *x = p->x + row * p->x_row;
        (p->wide ? gated_16 : gated_8)(x, x + p->n, (float *)p->out + row * p->n, p->n);
    }
}

/* out [count][n] = silu(x[..][0 .. n)) * x[..][n .. 2 n). */
void afterglow_gated_silu_3(const float *x, int64_t x_row, float *out, int64_t count, int64_t n, int threads, int width) {
    const rows p = {.x = x, .x_row = x_row, .out = out, .n = n, .wide = width == 16};
    pass(gated_rows, &p, count, count * n, threads);
}
