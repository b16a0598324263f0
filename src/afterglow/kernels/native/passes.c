/* Operations on rows, one pass over the rows each: rotation, norm, gated activation, rounding to 8 bits and back. Float32.

   Torch takes three to six operations for each. Every one reads and writes all rows, and for a single row the call takes longer
   than the work. Compiled and called as segments.c is. */

#include "team.h"

#include <float.h>
#include <immintrin.h>
#include <math.h>

#define NO_WAKE 65536 /* below so many numbers no thread is woken */
#define PIECE 8192    /* numbers that one thread passes at a time */

#define MOST_SCALE 0x1.020406p+121f /* times 127, the largest that is finite */
#define ROUNDING 12582912.0f        /* 1.5 * 2^23: added to a number, it leaves the rounded number in the lowest bits */
#define ROUNDING_BITS 0x4b400000

TARGET(AVX512)
#define V 16
#include "vectors.h"
#include "passes.h"
END_TARGET

TARGET(AVX2)
#define V 8
#include "vectors.h"
#include "passes.h"
END_TARGET

/* Shares `count` rows, `numbers` numbers in all. */
static void share_rows(piece_work *call, const void *job, int64_t count, int64_t numbers, int threads) {
    team_share(call, job, count, numbers < PIECE ? count : 1 + count * PIECE / numbers, threads, numbers >= NO_WAKE);
}

typedef struct {
    const afterglow_rotation *rotation;
    int wide;
} rotation_job;

static void rotate_rows(const void *what, int64_t from, int64_t to, int worker) {
    const rotation_job *job = what;
    const afterglow_rotation *r = job->rotation;
    const int64_t dim = r->rotary_dim;
    (void)worker;
    for (int64_t row = from; row < to; row++)
        for (int64_t head = 0; head < r->heads; head++) {
            const float *x = r->x.data + row * r->x.row_stride + head * r->x.head_stride;
            float *out = r->out.data + row * r->out.row_stride + head * r->out.head_stride;
            (job->wide ? rotate_16 : rotate_8)(x, r->cos + row * dim, r->sin + row * dim, out, dim);
            memcpy(out + dim, x + dim, (r->head_dim - dim) * sizeof *out);
        }
}

void afterglow_rotate(const afterglow_rotation *rotation, int threads, int width) {
    const rotation_job job = {.rotation = rotation, .wide = width == 16};
    share_rows(rotate_rows, &job, rotation->rows, rotation->rows * rotation->heads * rotation->head_dim, threads);
}

typedef struct {
    const afterglow_norm *norm;
    const float *x;
    int64_t stride, size; /* `size` numbers in a row of `out` */
    float *out;
    int wide;
    const afterglow_clamp *clamp;
} row_job;

static void norm_rows(const void *what, int64_t from, int64_t to, int worker) {
    const row_job *job = what;
    (void)worker;
    for (int64_t row = from; row < to; row++)
        (job->wide ? norm_16 : norm_8)(job->x + row * job->stride, job->norm->weight, job->norm->eps, job->out + row * job->size,
                                       job->size);
}

void afterglow_rms_norm(const afterglow_norm *norm, const float *x, int64_t x_stride, float *out, int64_t rows, int threads, int width) {
    const row_job job = {.norm = norm, .x = x, .stride = x_stride, .size = norm->size, .out = out, .wide = width == 16};
    share_rows(norm_rows, &job, rows, rows * norm->size, threads);
}

static void gate_rows(const void *what, int64_t from, int64_t to, int worker) {
    const row_job *job = what;
    (void)worker;
    for (int64_t row = from; row < to; row++) {
        const float *x = job->x + row * job->stride;
        (job->wide ? gate_16 : gate_8)(x, x + job->size, job->out + row * job->size, job->size);
    }
}

void afterglow_gated_silu(const float *x, int64_t x_stride, float *out, int64_t rows, int64_t size, int threads, int width) {
    const row_job job = {.x = x, .stride = x_stride, .size = size, .out = out, .wide = width == 16};
    share_rows(gate_rows, &job, rows, rows * size, threads);
}

static void gate_clamped_rows(const void *what, int64_t from, int64_t to, int worker) {
    const row_job *job = what;
    (void)worker;
    for (int64_t row = from; row < to; row++) {
        const float *x = job->x + row * job->stride;
        (job->wide ? gate_clamped_16 : gate_clamped_8)(x, x + job->size, job->out + row * job->size, job->size, job->clamp);
    }
}

void afterglow_gated_clamped(const afterglow_clamp *clamp, const float *x, int64_t x_stride, float *out, int64_t rows, int64_t size,
                             int threads, int width) {
    const row_job job = {.x = x, .stride = x_stride, .size = size, .out = out, .wide = width == 16, .clamp = clamp};
    share_rows(gate_clamped_rows, &job, rows, rows * size, threads);
}

typedef struct {
    const afterglow_rounding *rounding;
    int wide;
} rounding_job;

static void round_rows(const void *what, int64_t from, int64_t to, int worker) {
    const rounding_job *job = what;
    const afterglow_rounding *r = job->rounding;
    (void)worker;
    for (int64_t row = from; row < to; row++)
        r->scales[row] = (job->wide ? round_16 : round_8)(r->x + row * r->stride, r->levels, r->numbers + row * r->size, r->size);
}

void afterglow_round(const afterglow_rounding *rounding, int threads, int width) {
    const rounding_job job = {.rounding = rounding, .wide = width == 16};
    share_rows(round_rows, &job, rounding->rows, rounding->rows * rounding->size, threads);
}

typedef struct {
    const afterglow_narrowing *narrowing;
    int wide;
} narrowing_job;

static void narrow_rows(const void *what, int64_t from, int64_t to, int worker) {
    const narrowing_job *job = what;
    const afterglow_narrowing *n = job->narrowing;
    const int64_t bytes = n->head_dim + sizeof(float);
    (void)worker;
    for (int64_t row = from; row < to; row++)
        for (int64_t head = 0; head < n->heads; head++)
            (job->wide ? narrow_16 : narrow_8)(n->x.data + row * n->x.row_stride + head * n->x.head_stride,
                                               n->out + (row * n->heads + head) * bytes, n->head_dim);
}

void afterglow_narrow(const afterglow_narrowing *narrowing, int threads, int width) {
    const narrowing_job job = {.narrowing = narrowing, .wide = width == 16};
    share_rows(narrow_rows, &job, narrowing->rows, narrowing->rows * narrowing->heads * narrowing->head_dim, threads);
}

typedef struct {
    const afterglow_widening *widening;
    int wide;
} widening_job;

static void widen_rows(const void *what, int64_t from, int64_t to, int worker) {
    const widening_job *job = what;
    const afterglow_widening *w = job->widening;
    const int64_t bytes = w->head_dim + sizeof(float);
    (void)worker;
    for (int64_t row = from; row < to; row++)
        for (int64_t head = 0; head < w->heads; head++)
            (job->wide ? widen_16 : widen_8)(w->stored + row * w->stride + head * bytes,
                                             w->out.data + row * w->out.row_stride + head * w->out.head_stride, w->head_dim);
}

void afterglow_widen(const afterglow_widening *widening, int threads, int width) {
    const widening_job job = {.widening = widening, .wide = width == 16};
    share_rows(widen_rows, &job, widening->rows, widening->rows * widening->heads * widening->head_dim, threads);
}

typedef struct {
    const afterglow_gathering *gathering;
    int wide;
} gathering_job;

/* A piece's keys, then its values. */
static void gather_pieces(const void *what, int64_t from, int64_t to, int worker) {
    const gathering_job *job = what;
    const afterglow_gathering *g = job->gathering;
    const int64_t d = g->head_dim, dim = g->rotary_dim, line = g->row_bytes / g->kv_heads;
    (void)worker;
    for (int64_t at = from; at < to; at++) {
        const int64_t *piece = g->pieces + at / 2 * 4, value = at % 2, first = piece[1];
        const char *rows = (const char *)g->stored + value * g->plane_bytes + piece[0] * AFTERGLOW_PAGE_ROWS * g->row_bytes;
        for (int64_t i = first; i < piece[2]; i++) {
            const int64_t own = piece[3] + i - first, angle = (own - g->angles_from) * dim;
            if (own < g->least) continue;
            float *out = (float *)(intptr_t)g->pages[own / AFTERGLOW_PAGE_ROWS];
            out += ((g->layer * 2 + value) * g->kv_heads * g->apart + own % AFTERGLOW_PAGE_ROWS) * d;
            for (int64_t head = 0; head < g->kv_heads; head++, out += g->apart * d) {
                const char *x = rows + i * g->row_bytes + head * line;
                const int plain = g->kind == AFTERGLOW_FLOAT32 && dim && !value; /* turned on its way */
                if (!plain) (job->wide ? floats_16 : floats_8)(x, g->kind, out, d);
                else memcpy(out + dim, x + dim * sizeof *out, (d - dim) * sizeof *out);
                if (dim && !value)
                    (job->wide ? rotate_16 : rotate_8)(plain ? (const float *)x : out, g->cos + angle, g->sin + angle, out, dim);
            }
        }
    }
}

void afterglow_gather(const afterglow_gathering *gathering, int threads, int width) {
    const gathering_job job = {.gathering = gathering, .wide = width == 16};
    const int64_t numbers = 2 * AFTERGLOW_PAGE_ROWS * gathering->kv_heads * gathering->head_dim * gathering->count;
    team_share(gather_pieces, &job, 2 * gathering->count, 1, threads, numbers >= NO_WAKE);
}
