/* What a layer does to rows after attention, in one call: out, norm, MLP, and the norm that comes next.

   For a single row each of these takes less time than to be called from Python. Of many, so few go through all of it at a time that
   what is between stays in the second and third cache. Built and called as segments.c is. */

#include "team.h"

#include "functions.h"

#define CHUNK 240 /* as in matrix.c */

/* A matrix in panels: of bytes, with factors, or of floats, with a bias, or null. */
typedef struct {
    int64_t panels, more, inputs, outputs, bytes;
} matrix;

typedef struct {
    int64_t weight; /* [hidden] */
    double eps;
} norm;

typedef struct {
    matrix out, mlp_in, mlp_out; /* mlp_in: gates, and then what they let through */
    norm before, after;          /* the MLP */
} block;

static int multiply(const matrix *m, const float *x, int64_t x_stride, int64_t rows, int more, float *out, int threads, int width) {
    const void *panels = (const void *)(intptr_t)m->panels;
    const float *with = (const float *)(intptr_t)m->more;
    return m->bytes ? afterglow_multiply_bytes_3(x, x_stride, rows, m->inputs, panels, m->outputs, with, more, out, threads)
                    : afterglow_multiply_3(x, x_stride, rows, m->inputs, panels, m->outputs, with, more, out, threads, width);
}

/* x [rows][hidden], what the layer began with, becomes what it ends with, given `attended` [rows][out.inputs] (rows
   `attended_stride` floats apart); normed [rows][hidden] the same after the next norm. Returns 0, or 1 where there was no memory. */
int afterglow_block_3(const block *b, float *x, const float *attended, int64_t attended_stride, float *normed, int64_t rows,
                      int threads, int width) {
    const int64_t hidden = b->out.outputs, wide = b->mlp_in.outputs, most = rows < CHUNK ? rows : CHUNK;
    if (rows == 0) return 0;
    float *inner = malloc(most * (wide + wide / 2) * sizeof *inner), *gated = inner + most * wide;
    if (!inner) return 1;
    int failed = 0;
    for (int64_t first = 0; first < rows && !failed; first += CHUNK) {
        const int64_t n = rows - first < CHUNK ? rows - first : CHUNK;
        float *own = x + first * hidden, *to = normed + first * hidden;
        failed |= multiply(&b->out, attended + first * attended_stride, attended_stride, n, 1, own, threads, width);
        afterglow_rms_norm_3(own, hidden, (const float *)(intptr_t)b->before.weight, b->before.eps, to, n, hidden, threads, width);
        failed |= multiply(&b->mlp_in, to, hidden, n, 0, inner, threads, width);
        afterglow_gated_silu_3(inner, wide, gated, n, wide / 2, threads, width);
        failed |= multiply(&b->mlp_out, gated, wide / 2, n, 1, own, threads, width);
        afterglow_rms_norm_3(own, hidden, (const float *)(intptr_t)b->after.weight, b->after.eps, to, n, hidden, threads, width);
    }
    free(inner);
    return failed;
}
