/* The part of a layer after attention, in one call: output matrix, norm, MLP or experts, and the norm that comes next.

   For a single row each operation runs for less time than a call from Python takes. Many rows go through in chunks, so small
   that intermediate results stay in the second and third cache. Compiled and called as segments.c is. */

#include "block.h"

int multiply_any(const afterglow_matrix *matrix, const float *x, int64_t x_stride, int64_t rows, int add, float *out, int threads, int width) {
    switch (matrix->format) {
        case AFTERGLOW_FLOATS: return afterglow_multiply(matrix, x, x_stride, rows, add, out, threads, width);
        case AFTERGLOW_BYTES: return afterglow_multiply_bytes(matrix, x, x_stride, rows, add, out, threads);
        default: return afterglow_multiply_packed(matrix, x, x_stride, rows, add, out, threads, width);
    }
}

int afterglow_finish_layer(const afterglow_layer *layer, float *x, const float *attended, int64_t attended_stride, float *normed,
                           int64_t rows, int threads, int width) {
    const int64_t hidden = layer->out.outputs, most = rows < CHUNK ? rows : CHUNK, wide = layer->experts ? 0 : layer->mlp_in.outputs;
    if (rows == 0) return 0;
    float *inner = malloc(most * (wide + wide / 2) * sizeof *inner + 1), *gated = inner + most * wide;
    if (!inner) return 1;
    int failed = 0;
    for (int64_t first = 0; first < rows && !failed; first += CHUNK) {
        const int64_t count = rows - first < CHUNK ? rows - first : CHUNK;
        float *own = x + first * hidden, *to = normed + first * hidden;
        failed |= multiply_any(&layer->out, attended + first * attended_stride, attended_stride, count, 1, own, threads, width);
        afterglow_rms_norm(&layer->before, own, hidden, to, count, threads, width);
        if (layer->experts) continue;
        failed |= multiply_any(&layer->mlp_in, to, hidden, count, 0, inner, threads, width);
        afterglow_gated_silu(inner, wide, gated, count, wide / 2, threads, width);
        failed |= multiply_any(&layer->mlp_out, gated, wide / 2, count, 1, own, threads, width);
        afterglow_rms_norm(&layer->after, own, hidden, to, count, threads, width);
    }
    free(inner);
    if (!layer->experts || failed) return failed;
    failed = add_experts(layer->experts, normed, x, rows, threads, width);
    afterglow_rms_norm(&layer->after, x, hidden, normed, rows, threads, width);
    return failed;
}
