/* Attention of a few queries over each of many segments, merged by log-sum-exp: float32, natural logarithm.

   Decoding is one query for each job over rows that only this job has: hundreds of short products, of which a library call
   each costs more than the product. Here a step's segments, private and shared, are one list of tasks (a segment's rows of
   one KV head, in chunks), which one team of threads works off; what several tasks found for a query is merged afterwards.

   Built without Python or torch headers and called with addresses (see decode.py). */

#include "team.h"

#include <float.h>
#include <math.h>

#define BLOCK 64   /* rows whose scores are kept at a time: keys, queries and scores stay in the first cache */
#define FEW 6      /* so many queries of one KV head are faster one by one */
#define CHUNK 256  /* rows of a task at least */
#define ALONE 16384 /* rows of a KV head that nobody is woken for */
#define MOST_LANES 32
#define MANY_PARTS 64 /* to merge, so that a head of them is worth handing over */

/* Queries of one KV head while its rows pass by. `q` is scaled; [queries][d], or tiles of
   [d][2 V]. */
typedef struct {
    int64_t queries, d;
    float *q, *out, *most, *sum; /* out [queries][d], most and sum [queries]: the softmax so far, not yet divided */
    float *scores;               /* [BLOCK][MOST_LANES] */
    int32_t *seen;               /* [queries]: how many rows a query sees, growing; null: all of them. `many` only */
} state;

typedef void kernel(const float *keys, const float *values, int64_t rows, state s);
typedef void column_kernel(const float *keys, int64_t apart, int64_t rows, const float *own_keys, int64_t own_apart, int64_t own,
                           const float *q, int64_t d, int64_t queries, const int32_t *seen, const float *rest, float *scores,
                           float *sums);

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#define V 16
#include "vectors.h"
#include "rows.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define V 8
#include "vectors.h"
#include "rows.h"
#pragma GCC pop_options

/* Floats in the widest vectors that this processor has; the narrower ones run as well. 0: there is nothing here for it. */
int afterglow_width_3(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq")) return 8;
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? 16 : 8;
}

/* A segment: rows [start, start + rows) of float [layers][2][kv_heads][capacity][d] at `base`, seen by the queries
   where[first .. first + count). `causal`: those are its last rows' own, and see no row after theirs. */
typedef struct {
    int64_t base, capacity, start, rows, first, count, causal;
} segment;

typedef struct {
    int64_t segment, head, row, rows, part;
} task;

/* Rows of a task of this segment: about `chunk`, but never fewer than it has queries, so that there is not more to merge than to
   read. */
static int64_t piece(int64_t chunk, const segment *g) {
    int64_t least = g->count > CHUNK ? g->count : CHUNK;
    return ((chunk > least ? chunk : least) + BLOCK - 1) / BLOCK * BLOCK;
}

/* Part (out [d], lse) into what has been found before. */
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
    const float *q;
    float *out, *lse;
    int64_t q_stride, heads, kv_heads, d, layer, count, tile, chunk, room;
    float scale;
    const segment *segments;
    const int64_t *where;
    const task *todo;
    float *part, *part_lse, *desks; /* what each task found; `room` floats to work with for each thread */
} attention;

static void tasks_done(const void *what, int64_t from, int64_t to, int desk) {
    const attention a = *(const attention *)what;
    const int64_t d = a.d, group = a.heads / a.kv_heads;
    for (int64_t t = from; t < to; t++) {
        const task now = a.todo[t];
        const segment *g = a.segments + now.segment;
        const float *keys = (const float *)(intptr_t)g->base +
                            ((a.layer * 2 * a.kv_heads + now.head) * g->capacity + g->start + now.row) * d;
        const int64_t queries = g->count * group, full = (queries + a.tile - 1) / a.tile * a.tile;
        const int tiled = queries > FEW || g->causal;
        state s = {.queries = queries, .d = d, .scores = a.desks + desk * a.room};
        s.q = s.scores + BLOCK * MOST_LANES, s.out = s.q + full * d, s.most = s.out + full * d, s.sum = s.most + full;
        s.seen = g->causal ? (int32_t *)(s.sum + full) : 0;
        for (int64_t i = 0; g->causal && i < full; i++) {
            int64_t own = i < queries ? i / group : g->count - 1;
            s.seen[i] = g->rows - g->count + 1 + own - now.row;
        }
        if (tiled) memset(s.q, 0, full * d * sizeof *s.q);
        memset(s.out, 0, full * d * sizeof *s.out);
        for (int64_t i = 0; i < full; i++) s.most[i] = -FLT_MAX, s.sum[i] = 0;
        for (int64_t i = 0; i < queries; i++) {
            const float *q = a.q + a.where[g->first + i / group] * a.q_stride + (now.head * group + i % group) * d;
            float *own = tiled ? s.q + i / a.tile * a.tile * d + i % a.tile : s.q + i * d;
            for (int64_t x = 0; x < d; x++) own[tiled ? x * a.tile : x] = q[x] * a.scale;
        }
        (tiled ? a.many : a.few)(keys, keys + a.kv_heads * g->capacity * d, now.rows, s);
        for (int64_t i = 0; i < queries; i++) {
            int64_t at = (now.part + i / group) * a.heads + now.head * group + i % group;
            float whole = s.sum[i] > 0 ? 1 / s.sum[i] : 0; /* a query that sees none of a task's rows: lse of -infinity */
            for (int64_t x = 0; x < d; x++) a.part[at * d + x] = s.out[i * d + x] * whole;
            a.part_lse[at] = s.most[i] + logf(s.sum[i]);
        }
    }
}

static void heads_merged(const void *what, int64_t from, int64_t to, int desk) {
    const attention a = *(const attention *)what;
    (void)desk;
    for (int64_t head = from; head < to; head++) {
        int64_t at = head;
        for (int64_t s = 0; s < a.count; s++)
            for (int64_t row = 0; row < a.segments[s].rows; row += piece(a.chunk, a.segments + s))
                for (int64_t i = 0; i < a.segments[s].count; i++, at += a.heads) {
                    int64_t own = a.where[a.segments[s].first + i] * a.heads + head;
                    merge(a.out + own * a.d, a.lse + own, a.part + at * a.d, a.part_lse[at], a.d);
                }
    }
}

/* Merges attention of q [.][heads][d] (rows `q_stride` floats apart) over `layer` of all segments into out [.][heads][d] and
   lse [.][heads], both contiguous. Returns 0, or 1 where there was no memory. */
int afterglow_attend_3(const float *q, int64_t q_stride, float *out, float *lse, int64_t heads, int64_t kv_heads, int64_t d,
                       float scale, int64_t layer, const segment *segments, int64_t count, const int64_t *where, int threads,
                       int width) {
    const int64_t group = heads / kv_heads;
    int64_t work = 0, effort = 0, widest = 1, tasks = 0, parts = 0;
    for (int64_t s = 0; s < count; s++) {
        work += segments[s].rows * kv_heads;
        effort += segments[s].rows * kv_heads * (8 + segments[s].count * group) / 8;
        if (segments[s].count * group > widest) widest = segments[s].count * group;
    }
    const int64_t chunk = threads == 1 ? INT64_MAX / 2 : work / (8 * threads);
    for (int64_t s = 0; s < count; s++) {
        int64_t pieces = (segments[s].rows + piece(chunk, segments + s) - 1) / piece(chunk, segments + s);
        tasks += pieces * kv_heads;
        parts += pieces * segments[s].count;
    }
    if (tasks == 0) return 0;
    attention a = {.few = width == 16 ? few_16 : few_8, .many = width == 16 ? many_16 : many_8, .tile = 2 * width};
    a.q = q, a.q_stride = q_stride, a.out = out, a.lse = lse, a.heads = heads, a.kv_heads = kv_heads, a.d = d, a.scale = scale;
    a.layer = layer, a.segments = segments, a.count = count, a.where = where, a.chunk = chunk;
    a.room = (widest + MOST_LANES) * (2 * d + 3) + BLOCK * MOST_LANES;
    task *todo = malloc(tasks * sizeof *todo);
    a.part = malloc(parts * heads * (d + 1) * sizeof *a.part), a.part_lse = a.part + parts * heads * d;
    a.desks = malloc(threads * a.room * sizeof *a.desks);
    if (!todo || !a.part || !a.desks) {
        free(todo), free(a.part), free(a.desks);
        return 1;
    }
    int64_t at = 0, first_part = 0;
    for (int64_t s = 0; s < count; s++)
        for (int64_t row = 0; row < segments[s].rows; row += piece(chunk, segments + s), first_part += segments[s].count)
            for (int64_t head = 0; head < kv_heads; head++) {
                int64_t left = segments[s].rows - row, size = piece(chunk, segments + s);
                todo[at++] = (task){s, head, row, left < size ? left : size, first_part};
            }
    a.todo = todo;
    team_share(tasks_done, &a, tasks, 1, threads, effort >= ALONE);
    team_share(heads_merged, &a, heads, parts < MANY_PARTS ? heads : 1, threads, effort >= ALONE);
    free(todo), free(a.part), free(a.desks);
    return 0;
}

/* Copies rows of keys and values, [.][kv_heads][d] with rows `k_stride` and `v_stride` floats apart, to `layer` of contexts: row
   where[first + i] of the batch becomes row start + i of the segment. */
void afterglow_append_3(const float *k, int64_t k_stride, const float *v, int64_t v_stride, int64_t kv_heads, int64_t d,
                        int64_t layer, const segment *segments, int64_t count, const int64_t *where) {
    for (int64_t s = 0; s < count; s++) {
        const segment *g = segments + s;
        float *keys = (float *)(intptr_t)g->base + (layer * 2 * kv_heads * g->capacity + g->start) * d;
        float *values = keys + kv_heads * g->capacity * d;
        for (int64_t i = 0; i < g->rows; i++)
            for (int64_t head = 0; head < kv_heads; head++) {
                int64_t to = (head * g->capacity + i) * d, row = where[g->first + i];
                memcpy(keys + to, k + row * k_stride + head * d, d * sizeof *k);
                memcpy(values + to, v + row * v_stride + head * d, d * sizeof *v);
            }
    }
}

/* Column sums of attention weights, while they are computed. */
typedef struct {
    column_kernel *columns;
    const float *q, *past, *own, *rest;
    int64_t q_row, heads, group, d, n, past_row, past_head, rows, own_row, own_head, count, tile, tiles, room;
    float scale, *desks, *parts, *out; /* parts [kv_heads * tiles][rows] */
} summing;

static void tiles_summed(const void *what, int64_t from, int64_t to, int desk) {
    const summing a = *(const summing *)what;
    float *q = a.desks + desk * a.room, *rest = q + a.d * a.tile, *scores = rest + a.tile;
    int32_t seen[MOST_LANES];
    for (int64_t t = from; t < to; t++) {
        const int64_t head = t / a.tiles, first = t % a.tiles * a.tile, left = a.n * a.group - first;
        const int64_t queries = left < a.tile ? left : a.tile;
        memset(q, 0, a.d * a.tile * sizeof *q);
        for (int64_t lane = 0; lane < a.tile; lane++) {
            const int64_t at = first + (lane < queries ? lane : queries - 1), i = at / a.group;
            const int64_t own = head * a.group + at % a.group;
            seen[lane] = a.count - a.n + 1 + i;
            if (a.rest) rest[lane] = a.rest[i * a.heads + own];
            for (int64_t x = 0; lane < queries && x < a.d; x++) q[x * a.tile + lane] = a.q[i * a.q_row + own * a.d + x] * a.scale;
        }
        a.columns(a.past + head * a.past_head, a.past_row, a.rows, a.own + head * a.own_head, a.own_row, a.count, q, a.d, queries, seen,
                  a.rest ? rest : 0, scores, a.parts + t * a.rows);
    }
}

static void parts_summed(const void *what, int64_t from, int64_t to, int desk) {
    const summing *a = what;
    (void)desk;
    for (int64_t head = from; head < to; head++)
        for (int64_t t = 0; t < a->tiles; t++) {
            const float *part = a->parts + (head * a->tiles + t) * a->rows;
            float *out = a->out + head * a->rows;
            for (int64_t row = 0; row < a->rows; row++) out[row] = (t ? out[row] : 0) + part[row];
        }
}

/* out [kv_heads][rows]: what the softmax of q [n][heads][d] (rows `q_row` floats apart) over `rows` past rows, and so many of
   `count` own ones as end with the query's own, gives to each past row, summed up over the queries of each KV head. Past and own keys: rows and
   heads so many floats apart. `rest` [n][heads] or null: log-sum-exp of what they attend to besides. Returns 0, or 1 where there
   was no memory. */
int afterglow_column_sums_3(const float *q, int64_t q_row, int64_t n, int64_t heads, int64_t kv_heads, int64_t d, const float *past,
                            int64_t past_row, int64_t past_head, int64_t rows, const float *own, int64_t own_row, int64_t own_head,
                            int64_t count, const float *rest, float scale, float *out, int threads, int width) {
    summing a = {.columns = width == 16 ? columns_16 : columns_8, .q = q, .past = past, .own = own, .rest = rest, .scale = scale};
    a.q_row = q_row, a.heads = heads, a.group = heads / kv_heads, a.d = d, a.n = n, a.past_row = past_row, a.past_head = past_head;
    a.rows = rows, a.own_row = own_row, a.own_head = own_head, a.count = count, a.out = out, a.tile = 2 * width;
    a.tiles = (n * a.group + a.tile - 1) / a.tile;
    a.room = (d + 1 + rows + count) * a.tile;
    a.desks = malloc(threads * a.room * sizeof *a.desks);
    a.parts = calloc(kv_heads * a.tiles * rows, sizeof *a.parts);
    const int failed = !a.desks || !a.parts;
    if (!failed) {
        team_share(tiles_summed, &a, kv_heads * a.tiles, 1, threads, rows * d * kv_heads * a.tiles >= ALONE * 64);
        team_share(parts_summed, &a, kv_heads, 1, threads, 0);
    }
    free(a.desks), free(a.parts);
    return failed;
}
