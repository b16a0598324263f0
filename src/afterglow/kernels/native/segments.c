/* Attention of queries over each of many segments, decoding and prefills, private and shared rows, in one call: float32.

   Decoding is one query for each job over rows that only this job has: hundreds of short products, for which a library call
   each costs more than the product. Here a step's segments are one list of tasks (a segment's rows of one KV head, or a chunk of
   them), which one team of threads works off; the results of several tasks for a query are merged afterwards.

   A query's result depends on nothing but the query and the rows that it sees: bit for bit, it is the same in any batch, prefilled or
   decoded, with any threads, and wherever its rows are cut at a multiple of PAGE. Rows are divided at multiples of PAGE and CHUNK
   of their number in the context. A page's scores are products added up dimension by dimension; its weights are relative to its own
   largest score, and are added up as `many` does. Pages are joined one after another to a chunk's result, and chunks to the whole.
   What a task leaves is either all that a query sees, or a whole chunk's beginning, or one page.

   Compiled without Python or torch headers, and called with addresses (see afterglow.h). */

#include "team.h"

#include <float.h>
#include <immintrin.h>
#include <math.h>

#define PAGE AFTERGLOW_PAGE_ROWS /* rows whose scores are kept at a time: keys, queries and scores stay in the first cache */
#define CHUNK 256  /* rows of a task at least, a multiple of PAGE */
#define MAX_FEW 6  /* up to so many queries of one KV head are faster with rows in the lanes of vectors */
#define MAX_CUT 64 /* batch rows of a segment that is cut into chunks, unless others read on: there is not more to merge than to read */
#define TASKS 4    /* for each thread, of a segment that many batch rows read */
#define NO_WAKE 16384 /* below so many rows of a KV head no thread is woken */
#define MAX_LANES 32
#define NO_WINDOW (1 << 30)
#define MANY_PARTS 64 /* parts to merge before a second thread is used */

/* The softmax of some queries over rows so far: weighted sums out [queries][d], not yet divided by the sums of weights, sum [queries];
   weights are relative to e^most [queries]. */
typedef struct {
    float *out, *most, *sum;
} state;

/* Queries of one KV head while its rows pass by. `q` is scaled; tiles of [d][2 V], or, for `few`, see `row_products`. */
typedef struct {
    int64_t queries, d;
    float *q;
    state now;
    float *scores;  /* [PAGE][MAX_LANES] */
    int32_t *seen;  /* [queries]: the row after a query's last one, growing; null: it sees all rows. `many` only */
    int32_t window; /* how many rows before `seen` a query sees */
    float cap;      /* of scores, 0 for none */
} softmax;

/* Joins rows [from, to) of one page, given the keys and values of its first row in a head. `next`: what keys will be read then. */
typedef void kernel(const float *keys, const float *values, const float *next, int64_t from, int64_t to, softmax s);
typedef void merge_kernel(int64_t queries, int64_t d, state now, state further);
typedef void column_kernel(const float *keys, int64_t apart, int64_t rows, const float *own_keys, int64_t own_apart, int64_t own,
                           const float *q, int64_t d, int64_t queries, const int32_t *seen, const float *rest, float *scores,
                           float *sums);

TARGET(AVX512)
#define V 16
#include "vectors.h"
#include "rows.h"
END_TARGET

TARGET(AVX2)
#define V 8
#include "vectors.h"
#include "rows.h"
END_TARGET

int afterglow_abi_version(void) {
    return AFTERGLOW_ABI_VERSION;
}

int afterglow_width(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq")) return 8;
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? 16 : 8;
}

/* Rows of a segment, and those of its batch rows whose queries see them. */
typedef struct {
    int64_t segment, head, row, end, part, first, count;
} task;

/* A part of a batch row's result: where it is, and the chunk that it begins in. */
typedef struct {
    int64_t part, chunk;
} belonging;

/* A layer's attention, while it is computed. */
typedef struct {
    kernel *few, *many;
    merge_kernel *merge;
    const afterglow_table *table;
    const afterglow_queries *batch;
    int64_t layer, tile, scratch_size;
    const task *tasks;
    const int64_t *begin; /* of each batch row's links, and behind the last one's */
    const belonging *links;
    state parts;    /* [parts][heads] */
    float *scratch; /* `scratch_size` floats for each thread */
} attention;

/* Where rows from `row` on are cut: a part is one page, or begins with a chunk, so that parts can be joined in the order of rows. */
static int64_t cut(const afterglow_segment *g, int whole, int64_t row) {
    const int64_t stop = g->start + g->rows, size = row % CHUNK ? PAGE : CHUNK, end = row / size * size + size;
    return whole || end > stop ? stop : end;
}

/* Batch rows of a task: all, unless the segment has so many and so few tasks that threads would end at different times. A prefill of 512
   tokens with 3 KV heads was 3 equal tasks, for 2 threads as long as 4. */
static int64_t turn(int64_t pieces, int64_t kv_heads, const afterglow_segment *g, int threads) {
    const int64_t tasks = pieces ? pieces * kv_heads : 1, wanted = threads == 1 ? 1 : (TASKS * threads + tasks - 1) / tasks;
    const int64_t count = (g->count + wanted - 1) / wanted;
    return count < MAX_LANES ? MAX_LANES : (count + MAX_LANES - 1) / MAX_LANES * MAX_LANES;
}

static state state_at(state s, int64_t query, int64_t d) {
    return (state){s.out + query * d, s.most + query, s.sum + query};
}

static void clear(state s, int64_t queries, int64_t d) {
    memset(s.out, 0, queries * d * sizeof *s.out);
    for (int64_t i = 0; i < queries; i++) s.most[i] = -FLT_MAX, s.sum[i] = 0;
}

/* A query as a lane of a tile. */
static void spread_lane(const float *q, float scale, int64_t d, int64_t tile, float *to) {
    for (int64_t x = 0; x < d; x++) to[x * tile] = q[x] * scale;
}

/* A query as `row_products` reads it. */
static void spread_quarters(const float *q, float scale, int64_t d, int64_t lanes, float *to) {
    for (int64_t x = 0; x < d; x++)
        for (int64_t i = 0; i < 4; i++) to[x / lanes * 4 * lanes + x % 4 * lanes + x % lanes / 4 * 4 + i] = q[x] * scale;
}

/* Joins rows [from, to) of one page. */
static void attend_page(const attention *job, const float *keys, const float *values, const float *next, int64_t from, int64_t to,
                        int64_t group, int tiled, softmax s) {
    if (tiled || !s.seen) {
        (tiled ? job->many : job->few)(keys, values, next, from, to, s);
        return;
    }
    for (int64_t i = 0; i < s.queries; i += group) { /* batch row by batch row */
        softmax own = {.queries = group, .d = s.d, .q = s.q + i * 4 * s.d, .now = state_at(s.now, i, s.d), .scores = s.scores, .cap = s.cap};
        const int64_t first = s.seen[i] - s.window, end = to < s.seen[i] ? to : s.seen[i];
        job->few(keys, values, next, from > first ? from : first, end, own);
    }
}

/* The keys of a row's page in a layer and KV head. */
static float *page_of(const afterglow_table *table, const afterglow_segment *segment, int64_t row, int64_t layer, int64_t head) {
    return (float *)(intptr_t)segment->pages[row / PAGE] + (layer * 2 * table->kv_heads + head) * segment->apart * table->head_dim;
}

static void run_tasks(const void *what, int64_t from, int64_t to, int worker) {
    const attention job = *(const attention *)what;
    const afterglow_table table = *job.table;
    const afterglow_queries batch = *job.batch;
    const int64_t d = table.head_dim, group = batch.heads / table.kv_heads, tile = job.tile;
    for (int64_t t = from; t < to; t++) {
        const task now = job.tasks[t];
        const afterglow_segment *segment = table.segments + now.segment;
        const int64_t queries = now.count * group, full = (queries + tile - 1) / tile * tile;
        const int tiled = queries > MAX_FEW;
        softmax s = {.queries = queries, .d = d, .scores = job.scratch + worker * job.scratch_size, .cap = batch.cap};
        s.window = segment->window ? segment->window : NO_WINDOW, s.q = s.scores + PAGE * MAX_LANES;
        state whole = {.out = s.q + (tiled ? full : 4 * queries) * d};
        whole.most = whole.out + 2 * full * d, whole.sum = whole.most + full;
        s.now = (state){whole.out + full * d, whole.sum + full, whole.sum + 2 * full};
        s.seen = segment->causal ? (int32_t *)(s.now.sum + full) : 0;
        for (int64_t i = 0; segment->causal && i < full; i++) {
            int64_t own = now.first + (i < queries ? i / group : now.count - 1);
            s.seen[i] = segment->start + segment->rows - segment->count + 1 + own;
        }
        if (tiled) memset(s.q, 0, full * d * sizeof *s.q);
        for (int64_t i = 0; i < queries; i++) {
            const int64_t row = table.batch_rows[segment->first + now.first + i / group];
            const float *q = batch.queries + row * batch.stride + (now.head * group + i % group) * d;
            if (tiled) spread_lane(q, batch.scale, d, tile, s.q + i / tile * tile * d + i % tile);
            else spread_quarters(q, batch.scale, d, tile / 2, s.q + i * 4 * d);
        }
        for (int64_t row = now.row, end; row < now.end; row = end) {
            const int64_t next = row / CHUNK * CHUNK + CHUNK;
            const state other = whole;
            end = next < now.end ? next : now.end;
            clear(s.now, full, d);
            const float *keys = page_of(&table, segment, row, job.layer, now.head);
            for (int64_t at = row, to; at < end; at = to) {
                to = at / PAGE * PAGE + PAGE < end ? at / PAGE * PAGE + PAGE : end;
                const float *after = to < now.end ? page_of(&table, segment, to, job.layer, now.head) : keys;
                attend_page(&job, keys, keys + table.kv_heads * segment->apart * d, after, at, to, group, tiled, s);
                keys = after;
            }
            if (row > now.row) job.merge(queries, d, whole, s.now);
            else whole = s.now, s.now = other;
        }
        for (int64_t i = 0; i < queries; i++) {
            const int64_t at = (now.part + now.first + i / group) * batch.heads + now.head * group + i % group;
            memcpy(job.parts.out + at * d, whole.out + i * d, d * sizeof *whole.out);
            job.parts.most[at] = whole.most[i], job.parts.sum[at] = whole.sum[i];
        }
    }
}

/* Merges a result into what was found before, by log-sum-exp. */
static void merge_into(float *out, float *lse, state found, int64_t d) {
    const float whole = *found.sum > 0 ? 1 / *found.sum : 0, own = *found.most + logf(*found.sum); /* -infinity where nothing was seen */
    if (*lse == -INFINITY) {
        for (int64_t x = 0; x < d; x++) out[x] = found.out[x] * whole;
        *lse = own;
        return;
    }
    const float most = *lse > own ? *lse : own, before = expf(*lse - most), after = expf(own - most), sum = before + after;
    for (int64_t x = 0; x < d; x++) out[x] = out[x] * (before / sum) + found.out[x] * (whole * after / sum);
    *lse = most + logf(sum);
}

static void merge_rows(const void *what, int64_t from, int64_t to, int worker) {
    const attention job = *(const attention *)what;
    const int64_t d = job.table->head_dim, heads = job.batch->heads;
    (void)worker;
    for (int64_t row = from; row < to; row++) {
        state whole = {0};
        for (int64_t i = job.begin[row], end = job.begin[row + 1]; i < end;) {
            const belonging first = job.links[i++];
            const state chunk = state_at(job.parts, first.part * heads, d);
            for (; i < end && job.links[i].chunk == first.chunk; i++)
                job.merge(heads, d, chunk, state_at(job.parts, job.links[i].part * heads, d));
            if (whole.out) job.merge(heads, d, whole, chunk);
            else whole = chunk;
        }
        for (int64_t head = 0; whole.out && head < heads; head++)
            merge_into(job.batch->out + (row * heads + head) * d, job.batch->lse + row * heads + head, state_at(whole, head, d), d);
    }
}

/* A step's tasks, and which of their results belong together. */
typedef struct {
    task *tasks;
    belonging *links;
    int64_t *begin; /* as in `attention` */
    uint8_t *whole; /* of each segment: is it one part? */
    int64_t rows, count, parts;
} division;

/* Counts tasks, parts and links; where there is memory for them, writes them. */
static void divide(const afterglow_table *table, division *w, int threads) {
    w->count = w->parts = 0;
    for (int64_t s = 0; s < table->count; s++) {
        const afterglow_segment *g = table->segments + s;
        const int64_t stop = g->start + g->rows, *rows = table->batch_rows + g->first;
        int64_t pieces = 0;
        for (int64_t row = g->start; row < stop; row = cut(g, w->whole[s], row)) pieces++;
        const int64_t own = turn(pieces, table->kv_heads, g, threads);
        for (int64_t row = g->start, end; row < stop; row = end, w->parts += g->count) {
            end = cut(g, w->whole[s], row);
            for (int64_t i = 0; i < g->count; i++)
                if (w->links) w->links[w->begin[rows[i] + 1]++] = (belonging){w->parts + i, row / CHUNK};
                else w->begin[rows[i] + 2]++;
            /* The last rows first: where a query sees no row after its own, they take the longest. */
            for (int64_t first = (g->count - 1) / own * own; first >= 0; first -= own)
                for (int64_t head = 0; head < table->kv_heads; head++, w->count++)
                    if (w->tasks) w->tasks[w->count] = (task){s, head, row, end, w->parts, first, g->count - first < own ? g->count - first : own};
        }
    }
}

/* Plans a step. Returns 1 if there was no memory; what there is must be freed. */
static int plan(const afterglow_table *table, division *w, int threads) {
    int64_t rows = 0;
    for (int64_t s = 0; s < table->count; s++) {
        const afterglow_segment *g = table->segments + s;
        rows += g->rows * table->kv_heads;
        for (int64_t i = g->first; i < g->first + g->count; i++)
            if (table->batch_rows[i] >= w->rows) w->rows = table->batch_rows[i] + 1;
    }
    w->begin = calloc(w->rows + 2, sizeof *w->begin), w->whole = malloc(table->count + 1);
    if (!w->begin || !w->whole) return 1;
    for (const afterglow_segment *g = table->segments; g < table->segments + table->count; g++)
        for (int64_t i = 0; g->rows && i < g->count; i++) w->begin[table->batch_rows[g->first + i]]++; /* at first, how many it reads */
    for (int64_t s = 0; s < table->count; s++) {
        const afterglow_segment *g = table->segments + s;
        w->whole[s] = threads == 1 || g->count > MAX_CUT || g->rows <= CHUNK || g->rows <= rows / (8 * threads);
        for (int64_t i = 0; i < g->count && w->whole[s]; i++) w->whole[s] = w->begin[table->batch_rows[g->first + i]] == 1;
    }
    memset(w->begin, 0, w->rows * sizeof *w->begin);
    divide(table, w, threads);
    for (int64_t i = 2; i < w->rows + 2; i++) w->begin[i] += w->begin[i - 1];
    w->tasks = malloc((w->count + 1) * sizeof *w->tasks), w->links = malloc((w->parts + 1) * sizeof *w->links);
    if (!w->tasks || !w->links) return 1;
    divide(table, w, threads);
    return 0;
}

int afterglow_attend(const afterglow_table *table, int64_t layer, const afterglow_queries *batch, int threads, int width) {
    const int64_t d = table->head_dim, heads = batch->heads, group = heads / table->kv_heads;
    int64_t effort = 0, widest = 1;
    for (int64_t s = 0; s < table->count; s++) {
        const int64_t queries = table->segments[s].count * group;
        effort += table->segments[s].rows * table->kv_heads * (8 + queries) / 8;
        if (queries > widest) widest = queries;
    }
    attention job = {.few = width == 16 ? few_16 : few_8, .many = width == 16 ? many_16 : many_8, .tile = 2 * width};
    job.merge = width == 16 ? merge_16 : merge_8, job.table = table, job.batch = batch, job.layer = layer;
    job.scratch_size = (widest + MAX_LANES) * (3 * d + 5) + PAGE * MAX_LANES;
    division w = {0};
    int failed = plan(table, &w, threads);
    if (!failed) {
        const int64_t results = w.parts * heads;
        job.parts.out = malloc((results * (d + 2) + 1) * sizeof *job.parts.out);
        job.parts.most = job.parts.out + results * d, job.parts.sum = job.parts.most + results;
        job.scratch = malloc(threads * job.scratch_size * sizeof *job.scratch);
        job.tasks = w.tasks, job.links = w.links, job.begin = w.begin;
        failed = !job.parts.out || !job.scratch;
    }
    if (!failed) {
        const int64_t step = w.parts < MANY_PARTS ? w.rows : (w.rows + 4 * threads - 1) / (4 * threads);
        team_share(run_tasks, &job, w.count, 1, threads, effort >= NO_WAKE);
        team_share(merge_rows, &job, w.rows, step, threads, effort >= NO_WAKE);
    }
    free(w.tasks), free(w.links), free(w.begin), free(w.whole), free(job.parts.out), free(job.scratch);
    return failed;
}

void afterglow_append(const afterglow_table *table, int64_t layer, const float *keys, int64_t key_stride, const float *values,
                      int64_t value_stride) {
    const int64_t d = table->head_dim, kv_heads = table->kv_heads;
    for (int64_t s = 0; s < table->count; s++) {
        const afterglow_segment *segment = table->segments + s;
        for (int64_t i = 0; i < segment->rows; i++)
            for (int64_t head = 0; head < kv_heads; head++) {
                const int64_t row = table->batch_rows[segment->first + i], own = segment->start + i;
                float *to = page_of(table, segment, own, layer, head) + own % PAGE * d;
                memcpy(to, keys + row * key_stride + head * d, d * sizeof *keys);
                memcpy(to + kv_heads * segment->apart * d, values + row * value_stride + head * d, d * sizeof *values);
            }
    }
}

/* Column sums of attention weights, while they are computed. */
typedef struct {
    const afterglow_columns *columns;
    column_kernel *sum_columns;
    int64_t tile, tiles, scratch_size;
    float *scratch, *parts; /* parts [kv_heads * tiles][past_rows] */
} summation;

static void sum_tiles(const void *what, int64_t from, int64_t to, int worker) {
    const summation job = *(const summation *)what;
    const afterglow_columns columns = *job.columns;
    const int64_t d = columns.head_dim, tile = job.tile, group = columns.heads / columns.kv_heads;
    float *q = job.scratch + worker * job.scratch_size, *rest = q + d * tile, *scores = rest + tile;
    int32_t seen[MAX_LANES];
    for (int64_t t = from; t < to; t++) {
        const int64_t head = t / job.tiles, first = t % job.tiles * tile, left = columns.count * group - first;
        const int64_t queries = left < tile ? left : tile;
        memset(q, 0, d * tile * sizeof *q);
        for (int64_t lane = 0; lane < tile; lane++) {
            const int64_t at = first + (lane < queries ? lane : queries - 1), i = at / group;
            const int64_t own = head * group + at % group;
            const float *query = columns.queries + i * columns.query_stride + own * d;
            seen[lane] = columns.own_rows - columns.count + 1 + i;
            if (columns.other_lse) rest[lane] = columns.other_lse[i * columns.heads + own];
            for (int64_t x = 0; lane < queries && x < d; x++) q[x * tile + lane] = query[x] * columns.scale;
        }
        job.sum_columns(columns.past.data + head * columns.past.head_stride, columns.past.row_stride, columns.past_rows,
                        columns.own.data + head * columns.own.head_stride, columns.own.row_stride, columns.own_rows, q, d, queries, seen,
                        columns.other_lse ? rest : 0, scores, job.parts + t * columns.past_rows);
    }
}

static void sum_parts(const void *what, int64_t from, int64_t to, int worker) {
    const summation *job = what;
    const int64_t rows = job->columns->past_rows;
    (void)worker;
    for (int64_t head = from; head < to; head++)
        for (int64_t t = 0; t < job->tiles; t++) {
            const float *part = job->parts + (head * job->tiles + t) * rows;
            float *sums = job->columns->sums + head * rows;
            for (int64_t row = 0; row < rows; row++) sums[row] = (t ? sums[row] : 0) + part[row];
        }
}

int afterglow_column_sums(const afterglow_columns *columns, int threads, int width) {
    const int64_t d = columns->head_dim, kv_heads = columns->kv_heads, rows = columns->past_rows;
    summation job = {.columns = columns, .sum_columns = width == 16 ? columns_16 : columns_8, .tile = 2 * width};
    job.tiles = (columns->count * (columns->heads / kv_heads) + job.tile - 1) / job.tile;
    job.scratch_size = (d + 1 + rows + columns->own_rows) * job.tile;
    job.scratch = malloc(threads * job.scratch_size * sizeof *job.scratch);
    job.parts = calloc(kv_heads * job.tiles * rows, sizeof *job.parts);
    const int failed = !job.scratch || !job.parts;
    if (!failed) {
        team_share(sum_tiles, &job, kv_heads * job.tiles, 1, threads, rows * d * kv_heads * job.tiles >= NO_WAKE * 64);
        team_share(sum_parts, &job, kv_heads, 1, threads, 0);
    }
    free(job.scratch), free(job.parts);
    return failed;
}
