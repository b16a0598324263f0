/* Attention maps that are at hand, times values: read as they are stored, in half precision and packed, and written to their places.
   With torch a map is unpacked and widened first, multiplied, and the result copied. Compiled and called as segments.c is. */

#include "team.h"

#include <immintrin.h>

#define NO_WAKE 65536 /* to wake a thread takes about as long as so many products */
#define PIECE 16384   /* products that one thread does at a time */

/* Numbers of one head's map. */
INLINE int64_t map_numbers(const afterglow_maps *maps) {
    return maps->causal ? maps->length * (maps->length + 1) / 2 : maps->length * maps->length;
}

TARGET(AVX512)
#define V 16
#include "vectors.h"
#include "stored_maps.h"
END_TARGET

TARGET(AVX2)
#define V 8
#include "vectors.h"
#include "stored_maps.h"
END_TARGET

typedef struct {
    const afterglow_maps *maps;
    int wide;
    float *scratch;
    int64_t room; /* floats of each worker */
} map_job;

static void apply_pieces(const void *what, int64_t from, int64_t to, int worker) {
    const map_job *job = what;
    (job->wide ? apply_heads_16 : apply_heads_8)(job->maps, from, to, job->scratch + worker * job->room);
}

int afterglow_apply_maps(const afterglow_maps *maps, int threads, int width) {
    const int64_t numbers = map_numbers(maps), products = numbers * maps->head_dim, pieces = maps->count * maps->heads;
    map_job job = {.maps = maps, .wide = width == 16 && maps->head_dim % 16 == 0, .room = numbers + 16};
    job.scratch = malloc(threads * job.room * sizeof *job.scratch);
    if (!job.scratch) return 1;
    team_share(apply_pieces, &job, pieces, 1 + PIECE / (products + 1), threads, pieces * products >= NO_WAKE);
    free(job.scratch);
    return 0;
}
