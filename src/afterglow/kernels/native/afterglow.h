/* The binary interface of the kernels: every function that Python calls, and the structs that those functions take.

   C includes this file, and kernels/built.py reads it with cffi, where a pointer to numbers is an address. Raise the version with
   every change of a declaration. Strides count floats unless a comment says otherwise. `threads` is how many threads may share a
   call; `width` is how many floats a vector has: 16 or 8, at most what `afterglow_width` returns. A function that returns int
   returns 0, or 1 if there was no memory. */

#pragma once
#include <stdint.h>

#define AFTERGLOW_ABI_VERSION 20

/* Returns the version that the library was compiled with. */
int afterglow_abi_version(void);

/* Returns the number of floats in the widest vectors of this processor (narrower ones run as well), or 0 if no kernel runs on it. */
int afterglow_width(void);

/* Returns whether this processor multiplies bytes: what `afterglow_multiply_bytes` needs. */
int afterglow_bytes(void);

#define AFTERGLOW_PAGE_ROWS 64

/* Rows [start, start + rows) of a context, and the batch rows that read them: batch_rows[first .. first + count) of the table.
   pages[i] is the address of the page with rows [64 i, 64 i + 64): float [layers][2][kv_heads][64][head_dim], keys, then values, where
   heads are `apart` rows from each other.
   `causal`: the queries are those of the segment's last rows, and a query sees no row after its own; with a `window` that is not 0,
   no more than the last so many of these rows. */
typedef struct {
    const int64_t *pages;
    int64_t apart;
    int64_t start;
    int64_t rows;
    int64_t first;
    int64_t count;
    int64_t causal;
    int64_t window;
} afterglow_segment;

/* The segments of a step. */
typedef struct {
    const afterglow_segment *segments;
    int64_t count;
    const int64_t *batch_rows;
    int64_t kv_heads;
    int64_t head_dim;
} afterglow_table;

/* The queries of a batch, [rows][heads][head_dim] with rows `stride` apart, and their results so far: out [rows][heads][head_dim]
   and lse [rows][heads] (natural logarithm), both contiguous. A score x counts as cap * tanh(x / cap), unless `cap` is 0. */
typedef struct {
    const float *queries;
    int64_t stride;
    int64_t heads;
    float scale;
    float cap;
    float *out;
    float *lse;
} afterglow_queries;

/* Merges attention over `layer` of all segments into `out` and `lse` of the batch. */
int afterglow_attend(const afterglow_table *table, int64_t layer, const afterglow_queries *batch, int threads, int width);

/* Copies keys and values [rows][kv_heads][head_dim] of a batch to `layer` of pages: row batch_rows[first + i] of the batch
   becomes row start + i of the segment. */
void afterglow_append(const afterglow_table *table, int64_t layer, const float *keys, int64_t key_stride, const float *values,
                      int64_t value_stride);

/* What a matrix is kept in: floats, bytes with a scale for each output, or the blocks of a GGUF file. A4 and A8 are our own: 32
   numbers of 4 or 8 bits after a float32 scale and a zero in 8 bits. */
enum {
    AFTERGLOW_FLOATS,
    AFTERGLOW_BYTES,
    AFTERGLOW_Q8_0,
    AFTERGLOW_Q4_0,
    AFTERGLOW_Q4_1,
    AFTERGLOW_Q5_0,
    AFTERGLOW_Q5_1,
    AFTERGLOW_Q4_K,
    AFTERGLOW_Q5_K,
    AFTERGLOW_Q6_K,
    AFTERGLOW_MXFP4,
    AFTERGLOW_A4,
    AFTERGLOW_A8
};

/* A matrix in panels. Floats: panels [outputs / (2 width), rounded up][inputs][2 width], and `terms` the bias of as many outputs as
   the panels have, or null. Bytes: panels [outputs / 32, rounded up][inputs / 4, rounded up][32][4], and `terms` [panels][3][32]:
   the sum that an offset of 128 adds to an output (int32), scales, biases. Blocks: panels of 16 outputs, see packed.h, and `terms`
   the bias or null. */
typedef struct {
    const void *panels;
    const float *terms;
    int64_t inputs;
    int64_t outputs;
    int64_t format;
} afterglow_matrix;

/* Writes out [rows][outputs] = x [rows][inputs] times a matrix of floats, plus its bias; added to `out` if `add` is not 0. */
int afterglow_multiply(const afterglow_matrix *matrix, const float *x, int64_t x_stride, int64_t rows, int add, float *out, int threads,
                       int width);

/* Does the same with a matrix of bytes; rows of x are rounded to bytes, each with a scale of its own. */
int afterglow_multiply_bytes(const afterglow_matrix *matrix, const float *x, int64_t x_stride, int64_t rows, int add, float *out,
                             int threads);

#define AFTERGLOW_FLOAT32 0
#define AFTERGLOW_BFLOAT16 1
#define AFTERGLOW_FLOAT16 2
#define AFTERGLOW_INT8 3 /* of stored rows: see afterglow_narrowing */

/* Rows of weights as a checkpoint has them, [rows][size] of one of the types above, one after another. */
typedef struct {
    const void *data;
    int64_t rows;
    int64_t size;
    int64_t kind;
} afterglow_rows;

/* Rounds rows to bytes, each with a scale of its own: they become the outputs from `start` on of a matrix of bytes whose panels and
   terms are written. Needs what `afterglow_multiply_bytes` needs. */
void afterglow_fill_bytes(const afterglow_rows *rows, int64_t start, void *panels, float *terms, int threads);

/* Returns the bytes of a panel of 16 outputs with `inputs` inputs, in a format of blocks. */
int64_t afterglow_panel_bytes(int64_t format, int64_t inputs);

/* Writes the panels of a matrix, given the addresses of its outputs' rows, each in blocks as in a file. */
void afterglow_pack(const afterglow_matrix *matrix, const void *rows, int threads);

/* Multiplies with a matrix in blocks; rows of x are rounded to bytes, each group of 32 inputs with a scale of its own. */
int afterglow_multiply_packed(const afterglow_matrix *matrix, const float *x, int64_t x_stride, int64_t rows, int add, float *out,
                              int threads, int width);

/* Rounds rows, whose size is a multiple of 32, to blocks of Q4_0 (`bits` 4) or Q8_0 (8), row after row. */
void afterglow_round_blocks(const afterglow_rows *rows, int64_t bits, uint8_t *out, int threads);

/* An RMS norm: its weight [size], and the number that is added to the mean square. */
typedef struct {
    const float *weight;
    int64_t size;
    double eps;
} afterglow_norm;

/* Writes out [rows][size] = x / sqrt(mean(x^2) + eps) * weight. */
void afterglow_rms_norm(const afterglow_norm *norm, const float *x, int64_t x_stride, float *out, int64_t rows, int threads, int width);

/* Writes out [rows][size] = silu(x[.][0 .. size)) * x[.][size .. 2 size). */
void afterglow_gated_silu(const float *x, int64_t x_stride, float *out, int64_t rows, int64_t size, int threads, int width);

/* Gates that are clamped: see afterglow_gated_clamped. */
typedef struct {
    float alpha;
    float limit;
} afterglow_clamp;

/* Writes out [rows][size] = g / (1 + e^(-alpha g)) * (v + 1): gates g are the first half of a row of x, at most `limit`, numbers v the
   second half, cut at `limit` and its negative. */
void afterglow_gated_clamped(const afterglow_clamp *clamp, const float *x, int64_t x_stride, float *out, int64_t rows, int64_t size,
                             int threads, int width);

/* A mixture of experts. `router` yields a score for each of the `count` experts, of which a row takes the `chosen` highest, of equal
   ones the first; they weigh as the softmax over all scores says, or, `normed`, over those of the chosen. `matrices` [count][2]: one that
   yields gates, then the numbers that they let through, and the one behind it. `shared`: null, or two such matrices for all rows and a
   third with one output, whose logistic function is their weight. Gates are clamped unless `clamp.limit`
   is 0. */
typedef struct {
    afterglow_matrix router;
    const afterglow_matrix *matrices;
    const afterglow_matrix *shared;
    int64_t count;
    int64_t chosen;
    int64_t normed;
    afterglow_clamp clamp;
} afterglow_experts;

/* The part of a layer after attention. `mlp_in` yields gates, then the numbers that they let through. `experts`: instead of the two
   matrices of the MLP, or null. */
typedef struct {
    afterglow_matrix out;
    afterglow_matrix mlp_in;
    afterglow_matrix mlp_out;
    afterglow_norm before;
    afterglow_norm after;
    const afterglow_experts *experts;
} afterglow_layer;

/* Turns x [rows][hidden], the input of a layer, into the layer's output, given `attended` [rows][out.inputs]; writes the output after
   the next norm to normed [rows][hidden]. */
int afterglow_finish_layer(const afterglow_layer *layer, float *x, const float *attended, int64_t attended_stride, float *normed,
                           int64_t rows, int threads, int width);

/* Heads of rows, [rows][heads][head_dim]: rows and heads have a stride each. */
typedef struct {
    float *data;
    int64_t row_stride;
    int64_t head_stride;
} afterglow_heads;

/* A rotation of `x` into `out`. The first `rotary_dim` numbers of a head turn, in halves; the rest is copied. cos and sin
   [rows][rotary_dim], sin with the sign of its half. */
typedef struct {
    afterglow_heads x;
    afterglow_heads out;
    const float *cos;
    const float *sin;
    int64_t rows;
    int64_t heads;
    int64_t head_dim;
    int64_t rotary_dim;
} afterglow_rotation;

/* Writes the rotated rows. */
void afterglow_rotate(const afterglow_rotation *rotation, int threads, int width);

/* A layer of a decoder. `qkv` yields all query heads, then all key heads, then all value heads. Norms of queries and keys are of a head
   each, or of all heads together, or null; `sinks` [heads] or null. `scale` and `cap`: see afterglow_queries. */
typedef struct {
    afterglow_matrix qkv;
    const afterglow_layer *rest;
    const afterglow_norm *query_norm;
    const afterglow_norm *key_norm;
    const float *sinks;
    float scale;
    float cap;
} afterglow_whole_layer;

/* A step's rows in a layer: where they are appended and what they read, in contexts where the layer has this number. cos and sin
   [rows][rotary_dim], or null where the layer does not rotate. */
typedef struct {
    const afterglow_table *appends;
    const afterglow_table *reads;
    int64_t number;
    const float *cos;
    const float *sin;
    int64_t rotary_dim;
} afterglow_layer_rows;

/* Rows on their way through layers. x [rows][hidden] is the input of the first layer and becomes the output of the last; normed, of
   the same shape, is x after the norm that comes next. qkv [layers][rows][heads + 2 kv_heads][head_dim] gets what the layers project,
   after norms and before rotation. */
typedef struct {
    float *x;
    float *normed;
    float *qkv;
    int64_t rows;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
} afterglow_pass;

/* Takes the rows through `count` layers. Contexts hold all other rows that are read. */
int afterglow_go_through(const afterglow_whole_layer *layers, const afterglow_layer_rows *own, int64_t count, const afterglow_pass *pass,
                         int threads, int width);

/* A rounding of rows to bytes: x [rows][size] is about scales[row] * (numbers [row][size] - levels - 1). */
typedef struct {
    const float *x;
    int64_t stride;
    int64_t rows;
    int64_t size;
    int64_t levels;
    uint8_t *numbers;
    float *scales;
} afterglow_rounding;

/* Writes numbers and scales. */
void afterglow_round(const afterglow_rounding *rounding, int threads, int width);

/* Rows [rows][heads] as they are stored in 8 bits: `head_dim` signed numbers, and behind them the head's scale, a float at any
   address; head_dim + 4 bytes. A number times its scale is what it stands for. */
typedef struct {
    afterglow_heads x;
    int8_t *out;
    int64_t rows;
    int64_t heads;
    int64_t head_dim;
} afterglow_narrowing;

/* Writes stored rows [rows][heads][head_dim + 4] of x. */
void afterglow_narrow(const afterglow_narrowing *narrowing, int threads, int width);

/* Stored rows, `stride` bytes apart, that become floats. */
typedef struct {
    const int8_t *stored;
    int64_t stride;
    afterglow_heads out;
    int64_t rows;
    int64_t heads;
    int64_t head_dim;
} afterglow_widening;

/* Writes the rows that stored ones stand for. */
void afterglow_widen(const afterglow_widening *widening, int threads, int width);

/* Rows of a layer that come from host slots to a context. stored [2][slots][64][kv_heads], planes of keys and of values; a row has
   `row_bytes` bytes of a `kind`. pieces [count][4]: a slot, the first row there and the row after the last, and the row of the context
   that the first goes to; rows of the context before `least` are left out. pages: see afterglow_segment; head_dim is a multiple of 16.
   Keys turn by cos and sin [.][rotary_dim], which begin with row `angles_from` of the context, or not, where `rotary_dim` is 0. */
typedef struct {
    const void *stored;
    int64_t plane_bytes;
    int64_t row_bytes;
    int64_t kind;
    const int64_t *pieces;
    int64_t count;
    int64_t least;
    const int64_t *pages;
    int64_t apart;
    int64_t layer;
    int64_t kv_heads;
    int64_t head_dim;
    const float *cos;
    const float *sin;
    int64_t angles_from;
    int64_t rotary_dim;
} afterglow_gathering;

/* Writes the rows to the context. */
void afterglow_gather(const afterglow_gathering *gathering, int threads, int width);

/* Copies `count` rows of `bytes` bytes one after another: out[i] is row rows[i] of piece which[i]. pieces [.] are addresses;
   strides [.], in bytes, are those of a piece's rows. */
void afterglow_pick(const void *pieces, const int64_t *strides, const int64_t *which, const int64_t *rows, int64_t count, int64_t bytes,
                    void *out, int threads);

/* Queries [count][heads][head_dim] whose softmax over past rows and own rows is summed up for each past row. Own rows end with the
   rows of the queries themselves, and a query sees no row after its own. other_lse [count][heads], or null: log-sum-exp of the rows
   that the queries attend to besides. sums [kv_heads][past_rows]. head_dim is a multiple of 4. */
typedef struct {
    const float *queries;
    int64_t query_stride;
    int64_t count;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    afterglow_heads past;
    int64_t past_rows;
    afterglow_heads own;
    int64_t own_rows;
    const float *other_lse;
    float scale;
    float *sums;
} afterglow_columns;

/* Writes the sums over the queries of each KV head. */
int afterglow_column_sums(const afterglow_columns *columns, int threads, int width);

/* A vote of at most 4095 heads on rows: sums [heads][rows], heads `stride` apart, and their mean [rows]. The k (1 to rows) largest of
   each head (of equals the first ones) go to mask [heads][rows] and, ascending, to places [heads][k]. ranking [rows] gets all rows
   that have a vote: by votes, then by the larger mean, then the lower row first. */
typedef struct {
    const float *sums;
    int64_t stride;
    int64_t heads;
    int64_t rows;
    int64_t k;
    const float *mean;
    uint8_t *mask;
    int64_t *places;
    int64_t *ranking;
} afterglow_ballot;

/* Returns how many rows have a vote, or -1 if there was no memory. */
int64_t afterglow_vote(const afterglow_ballot *ballot, int threads);

/* Attention maps of `count` sentences of one length as they are stored, [heads][length * length], or, where they are causal, row by
   row without what lies above the diagonal. A sentence's map is the mean of stored [count][parts] (addresses) with weights
   [count][parts]; one whose weight is 0 is not read. `kind`: float32 or float16. values [count][length][kv_heads][head_dim], their
   rows `value_stride` apart; head_dim is a multiple of 8. Rows of sentence i go to out [.][heads][head_dim] from rows[i] on. */
typedef struct {
    const void *stored;
    const float *weights;
    int64_t parts;
    int64_t kind;
    int64_t causal;
    int64_t count;
    int64_t length;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    const float *values;
    int64_t value_stride;
    const int64_t *rows;
    float *out;
} afterglow_maps;

/* Writes the maps times the values. */
int afterglow_apply_maps(const afterglow_maps *maps, int threads, int width);

/* Opens a regular file of so many bytes, for reading, past the page cache if `direct`. Returns its descriptor, or -1 if anything is not
   so, or one of the last two folders of its path is none (a link to one is none): the caller has to find out what. */
int afterglow_open(const char *path, int64_t bytes, int direct);

/* A stretch of the file `fd`: `head_bytes` bytes that go to `head`, if any, then `planes` times `blocks` chunks. Chunk b of plane p goes to
   arena + p * plane_bytes + places[b], bytes, and its CRC32C to sums [planes][blocks]. */
typedef struct {
    int64_t fd;
    int64_t offset;
    const void *head;
    int64_t head_bytes;
    const void *arena;
    int64_t plane_bytes;
    int64_t planes;
    const int64_t *places;
    int64_t blocks;
    int64_t chunk_bytes;
    const uint32_t *sums;
} afterglow_reading;

/* What becomes of a stretch is told while the call is under way: to be read; taken back by the caller; being read, or there; left out. */
#define AFTERGLOW_WANTED 0
#define AFTERGLOW_TAKEN_BACK 1
#define AFTERGLOW_BEGUN 2
#define AFTERGLOW_LEFT_OUT 3

/* Reads `count` stretches in order, in whole pages, and sums them up. Returns 0, an error number of the system, or -1 if a file ends
   early; then nothing is known of what has come. `states` [count], unless it is 0: the caller may take a stretch back until it is
   begun. `by_ring`: with an io_uring if the system has one. */
int afterglow_read(const afterglow_reading *readings, int64_t count, uint8_t *states, int by_ring);

/* Sums up a stretch whose chunks are in the arena already; `fd`, `offset` and `head` do not count. */
void afterglow_sum(const afterglow_reading *reading);
