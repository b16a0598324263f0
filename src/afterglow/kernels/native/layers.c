/* All layers of a decode step in one call.

   A step of one request is a hundred operations, most of which take less time than their calls from Python do: a shape of 22 layers
   and 1.1 G weights in 4 bits (AMD Zen 4, two cores) spent 4 of 20 ms between them. Compiled and called as segments.c is. */

#include "block.h"

#include <math.h>

/* Where `heads` heads of each row lie, `width` floats to a row, from head `first` on. */
static afterglow_heads heads_of(float *rows, int64_t width, int64_t first, int64_t head_dim) {
    return (afterglow_heads){.data = rows + first * head_dim, .row_stride = width, .head_stride = head_dim};
}

/* Norms `heads` heads of each row, or all of them together, in place. */
static void norm_heads(const afterglow_norm *norm, afterglow_heads x, int64_t heads, const afterglow_pass *pass, int threads, int width) {
    if (!norm) return;
    const int64_t count = heads * pass->head_dim / norm->size;
    for (int64_t row = 0; row < pass->rows; row++) {
        float *own = x.data + row * x.row_stride;
        afterglow_rms_norm(norm, own, norm->size, own, count, threads, width);
    }
}

/* Memory for the intermediate results of a layer. */
typedef struct {
    float *turned, *out, *lse; /* [rows][heads + kv_heads][head_dim], [rows][heads][head_dim], [rows][heads] */
} results;

static int go_through(const afterglow_whole_layer *layer, const afterglow_layer_rows *own, const afterglow_pass *pass, float *qkv, results to,
                      int threads, int width) {
    const int64_t d = pass->head_dim, heads = pass->heads, all = heads + 2 * pass->kv_heads, outputs = all * d;
    const int64_t hidden = layer->rest->out.outputs;
    if (multiply_any(&layer->qkv, pass->normed, hidden, pass->rows, 0, qkv, threads, width)) return 1;
    const afterglow_heads q = heads_of(qkv, outputs, 0, d), k = heads_of(qkv, outputs, heads, d);
    norm_heads(layer->query_norm, q, heads, pass, threads, width);
    norm_heads(layer->key_norm, k, pass->kv_heads, pass, threads, width);
    afterglow_heads queries = q, keys = k;
    if (own->cos) {
        const int64_t both = heads + pass->kv_heads;
        queries = heads_of(to.turned, both * d, 0, d), keys = heads_of(to.turned, both * d, heads, d);
        const afterglow_rotation rotation = {q, queries, own->cos, own->sin, pass->rows, both, d, own->rotary_dim};
        afterglow_rotate(&rotation, threads, width);
    }
    afterglow_append(own->appends, own->number, keys.data, keys.row_stride, qkv + (heads + pass->kv_heads) * d, outputs);
    memset(to.out, 0, pass->rows * heads * d * sizeof *to.out); /* what all segments are merged into: nothing, or a sink */
    for (int64_t i = 0; i < pass->rows * heads; i++) to.lse[i] = layer->sinks ? layer->sinks[i % heads] : -INFINITY;
    const afterglow_queries batch = {queries.data, queries.row_stride, heads, layer->scale, layer->cap, to.out, to.lse};
    if (afterglow_attend(own->reads, own->number, &batch, threads, width)) return 1;
    return afterglow_finish_layer(layer->rest, pass->x, to.out, heads * d, pass->normed, pass->rows, threads, width);
}

int afterglow_go_through(const afterglow_whole_layer *layers, const afterglow_layer_rows *own, int64_t count, const afterglow_pass *pass,
                         int threads, int width) {
    const int64_t d = pass->head_dim, both = (pass->heads + pass->kv_heads) * d, outputs = both + pass->kv_heads * d;
    float *memory = malloc((pass->rows * (both + pass->heads * (d + 1)) + 1) * sizeof *memory);
    if (!memory) return 1;
    const results to = {memory, memory + pass->rows * both, memory + pass->rows * (both + pass->heads * d)};
    int failed = 0;
    for (int64_t layer = 0; layer < count && !failed; layer++)
        failed = go_through(layers + layer, own + layer, pass, pass->qkv + layer * pass->rows * outputs, to, threads, width);
    free(memory);
    return failed;
}
