/* Attention of a few queries over each of many segments, merged by log-sum-exp: float32, natural logarithm.

   Decoding is one query for each job over rows that only this job has: hundreds of short products, for which a library call
   each costs more than the product. Here a step's segments, private and shared, are one list of tasks (a segment's rows of
   one KV head, in chunks), which one team of threads works off; the results of several tasks for a query are merged afterwards.

   Compiled without Python or torch headers, and called with addresses (see afterglow.h). */

#include "team.h"

#include <float.h>
#include <math.h>

#define BLOCK 64   /* rows whose scores are kept at a time: keys, queries and scores stay in the first cache */
#define MAX_FEW 6  /* up to so many queries of one KV head are faster one by one */
#define CHUNK 256  /* rows of a task at least */
#define TASKS 4    /* for each thread, of a segment that many batch rows read */
#define DECODED 16 /* a causal segment of at most so many batch rows is a decode step's: one token's row, and those of guesses */
#define NO_WAKE 16384 /* below so many rows of a KV head no thread is woken */
#define MAX_LANES 32
#define ALL (INT64_MAX / 2)
#define NO_WINDOW (1 << 30)
#define MANY_PARTS 64 /* parts to merge before a second thread is used */

/* Queries of one KV head while its rows pass by. `q` is scaled; [queries][d], or tiles of
   [d][2 V]. */
typedef struct {
    int64_t queries, d;
    float *q, *out, *most, *sum; /* out [queries][d], most and sum [queries]: the softmax so far, not yet divided */
    float *scores;               /* [BLOCK][MAX_LANES] */
    int32_t *seen;               /* [queries]: the row after a query's last one, growing; null: it sees all rows. `many` only */
    int32_t window;              /* how many rows before `seen` a query sees */
    float cap;                   /* of scores, 0 for none */
} softmax;

typedef void kernel(const float *keys, const float *values, int64_t rows, softmax s);
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
    int64_t segment, head, row, rows, part, first, count;
} task;

/* Does a decode step read this segment? Then what a query's attention is rounded to depends on nothing but the rows that it sees: not
   on the other segments, nor on the rows of guesses behind its own. A reply is the same with them, alone, and in a batch. */
static int decoded(const afterglow_segment *g) {
    return g->count == 1 || (g->causal && g->count <= DECODED);
}

/* Rows of a task of this segment: about `chunk`, but never fewer than it has queries, so that there is not more to merge than to
   read. One thread takes all rows at once. */
static int64_t piece(int64_t chunk, const afterglow_segment *g) {
    if (decoded(g) && chunk != ALL) return CHUNK;
    int64_t least = g->count > CHUNK ? g->count : CHUNK;
    return ((chunk > least ? chunk : least) + BLOCK - 1) / BLOCK * BLOCK;
}

/* Batch rows of a task: all, unless the segment has so many and so few tasks that threads would end at different times. A prefill of 512
   tokens with 3 KV heads was 3 equal tasks, for 2 threads as long as 4. */
static int64_t turn(int64_t pieces, int64_t kv_heads, const afterglow_segment *g, int threads) {
    const int64_t tasks = pieces ? pieces * kv_heads : 1, wanted = threads == 1 ? 1 : (TASKS * threads + tasks - 1) / tasks;
    const int64_t count = (g->count + wanted - 1) / wanted;
    return count < MAX_LANES ? MAX_LANES : (count + MAX_LANES - 1) / MAX_LANES * MAX_LANES;
}

/* Merges a part (out [d], lse) into the result so far. */
static void merge(float *out, float *lse, const float *part, float part_lse, int64_t d) {
    if (*lse == -INFINITY) {
        memcpy(out, part, d * sizeof *out);
        *lse = part_lse;
        return;
    }
    float most = *lse > part_lse ? *lse : part_lse;
    float a = expf(*lse - most), b = expf(part_lse - most), sum = a + b;
    a /= sum, b /= sum;
    for (int64_t x = 0; x < d; x++) out[x] = out[x] * a + part[x] * b;
    *lse = most + logf(sum);
}

/* A layer's attention, while it is computed. */
typedef struct {
    kernel *few, *many;
    const afterglow_table *table;
    const afterglow_queries *batch;
    int64_t layer, tile, chunk, scratch_size;
    const task *tasks;
    float *parts, *part_lse, *scratch; /* results of each task; `scratch_size` floats for each thread */
} attention;

static void run_tasks(const void *what, int64_t from, int64_t to, int worker) {
    const attention job = *(const attention *)what;
    const afterglow_table table = *job.table;
    const afterglow_queries batch = *job.batch;
    const int64_t d = table.head_dim, group = batch.heads / table.kv_heads, tile = job.tile;
    for (int64_t t = from; t < to; t++) {
        const task now = job.tasks[t];
        const afterglow_segment *segment = table.segments + now.segment;
        const float *keys =
            segment->context + ((job.layer * 2 * table.kv_heads + now.head) * segment->capacity + segment->start + now.row) * d;
        const int64_t queries = now.count * group, full = (queries + tile - 1) / tile * tile;
        const int one_by_one = segment->causal && decoded(segment) && group <= MAX_FEW; /* as a row that is alone */
        const int tiled = !one_by_one && (segment->count * group > MAX_FEW || segment->causal);
        softmax s = {.queries = queries, .d = d, .scores = job.scratch + worker * job.scratch_size};
        s.window = segment->window ? segment->window : NO_WINDOW, s.cap = batch.cap;
        s.q = s.scores + BLOCK * MAX_LANES, s.out = s.q + full * d, s.most = s.out + full * d, s.sum = s.most + full;
        s.seen = segment->causal ? (int32_t *)(s.sum + full) : 0;
        for (int64_t i = 0; segment->causal && i < full; i++) {
            int64_t own = now.first + (i < queries ? i / group : now.count - 1);
            s.seen[i] = segment->rows - segment->count + 1 + own - now.row;
        }
        if (tiled) memset(s.q, 0, full * d * sizeof *s.q);
        memset(s.out, 0, full * d * sizeof *s.out);
        for (int64_t i = 0; i < full; i++) s.most[i] = -FLT_MAX, s.sum[i] = 0;
        for (int64_t i = 0; i < queries; i++) {
            const int64_t row = table.batch_rows[segment->first + now.first + i / group];
            const float *q = batch.queries + row * batch.stride + (now.head * group + i % group) * d;
            float *own = tiled ? s.q + i / tile * tile * d + i % tile : s.q + i * d;
            for (int64_t x = 0; x < d; x++) own[tiled ? x * tile : x] = q[x] * batch.scale;
        }
        const float *values = keys + table.kv_heads * segment->capacity * d;
        for (int64_t i = 0; one_by_one && i < queries; i += group) {
            softmax own = {.queries = group, .d = d, .q = s.q + i * d, .out = s.out + i * d, .most = s.most + i, .sum = s.sum + i};
            own.scores = s.scores, own.cap = s.cap;
            const int64_t begin = s.seen[i] > s.window ? s.seen[i] - s.window : 0, end = s.seen[i] < now.rows ? s.seen[i] : now.rows;
            if (end > begin) job.few(keys + begin * d, values + begin * d, end - begin, own);
        }
        if (!one_by_one) (tiled ? job.many : job.few)(keys, values, now.rows, s);
        for (int64_t i = 0; i < queries; i++) {
            int64_t at = (now.part + now.first + i / group) * batch.heads + now.head * group + i % group;
            float whole = s.sum[i] > 0 ? 1 / s.sum[i] : 0; /* a query that sees none of a task's rows: lse of -infinity */
            for (int64_t x = 0; x < d; x++) job.parts[at * d + x] = s.out[i * d + x] * whole;
            job.part_lse[at] = s.most[i] + logf(s.sum[i]);
        }
    }
}

static void merge_heads(const void *what, int64_t from, int64_t to, int worker) {
    const attention job = *(const attention *)what;
    const afterglow_table table = *job.table;
    const int64_t d = table.head_dim, heads = job.batch->heads;
    (void)worker;
    for (int64_t head = from; head < to; head++) {
        int64_t at = head;
        for (const afterglow_segment *segment = table.segments; segment < table.segments + table.count; segment++)
            for (int64_t row = 0; row < segment->rows; row += piece(job.chunk, segment))
                for (int64_t i = 0; i < segment->count; i++, at += heads) {
                    int64_t own = table.batch_rows[segment->first + i] * heads + head;
                    merge(job.batch->out + own * d, job.batch->lse + own, job.parts + at * d, job.part_lse[at], d);
                }
    }
}

int afterglow_attend(const afterglow_table *table, int64_t layer, const afterglow_queries *batch, int threads, int width) {
    const afterglow_segment *segments = table->segments;
    const int64_t d = table->head_dim, kv_heads = table->kv_heads, heads = batch->heads, group = heads / kv_heads;
    int64_t rows = 0, effort = 0, widest = 1, count = 0, parts = 0;
    for (int64_t s = 0; s < table->count; s++) {
        rows += segments[s].rows * kv_heads;
        effort += segments[s].rows * kv_heads * (8 + segments[s].count * group) / 8;
        if (segments[s].count * group > widest) widest = segments[s].count * group;
    }
    const int64_t chunk = threads == 1 ? ALL : rows / (8 * threads);
    for (int64_t s = 0; s < table->count; s++) {
        int64_t pieces = (segments[s].rows + piece(chunk, segments + s) - 1) / piece(chunk, segments + s);
        const int64_t own = turn(pieces, kv_heads, segments + s, threads);
        count += pieces * kv_heads * ((segments[s].count + own - 1) / own);
        parts += pieces * segments[s].count;
    }
    if (count == 0) return 0;
    attention job = {.few = width == 16 ? few_16 : few_8, .many = width == 16 ? many_16 : many_8, .tile = 2 * width};
    job.table = table, job.batch = batch, job.layer = layer, job.chunk = chunk;
    job.scratch_size = (widest + MAX_LANES) * (2 * d + 3) + BLOCK * MAX_LANES;
    task *tasks = malloc(count * sizeof *tasks);
    job.parts = malloc(parts * heads * (d + 1) * sizeof *job.parts), job.part_lse = job.parts + parts * heads * d;
    job.scratch = malloc(threads * job.scratch_size * sizeof *job.scratch);
    if (!tasks || !job.parts || !job.scratch) {
        free(tasks), free(job.parts), free(job.scratch);
        return 1;
    }
    int64_t at = 0, first_part = 0;
    for (int64_t s = 0; s < table->count; s++) {
        const int64_t all = segments[s].rows, size = piece(chunk, segments + s);
        const int64_t own = turn((all + size - 1) / size, kv_heads, segments + s, threads);
        for (int64_t row = 0; row < all; row += size, first_part += segments[s].count)
            /* The last rows first: where a query sees no row after its own, they take the longest. */
            for (int64_t first = (segments[s].count - 1) / own * own; first >= 0; first -= own)
                for (int64_t head = 0; head < kv_heads; head++) {
                    const int64_t left = segments[s].count - first;
                    tasks[at++] = (task){s, head, row, all - row < size ? all - row : size, first_part, first, left < own ? left : own};
                }
    }
    job.tasks = tasks;
    team_share(run_tasks, &job, count, 1, threads, effort >= NO_WAKE);
    team_share(merge_heads, &job, heads, parts < MANY_PARTS ? heads : 1, threads, effort >= NO_WAKE);
    free(tasks), free(job.parts), free(job.scratch);
    return 0;
}

void afterglow_append(const afterglow_table *table, int64_t layer, const float *keys, int64_t key_stride, const float *values,
                      int64_t value_stride) {
    const int64_t d = table->head_dim, kv_heads = table->kv_heads;
    for (int64_t s = 0; s < table->count; s++) {
        const afterglow_segment *segment = table->segments + s;
        float *own_keys = (float *)segment->context + (layer * 2 * kv_heads * segment->capacity + segment->start) * d;
        float *own_values = own_keys + kv_heads * segment->capacity * d;
        for (int64_t i = 0; i < segment->rows; i++)
            for (int64_t head = 0; head < kv_heads; head++) {
                int64_t to = (head * segment->capacity + i) * d, row = table->batch_rows[segment->first + i];
                memcpy(own_keys + to, keys + row * key_stride + head * d, d * sizeof *keys);
                memcpy(own_values + to, values + row * value_stride + head * d, d * sizeof *values);
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
