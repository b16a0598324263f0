/* One call reads a stretch of a file into slots of an arena, and checks what has come while the rest is on its way.

   The stretch is read in pieces. With an io_uring all of them are handed to the system at once, so that the device never waits for
   this thread, and no second thread is needed for the checksums; where the system refuses one (containers often do), the pieces are
   read one after another. No call returns before the system has let go of the memory.

   Compiled and called as segments.c is. */

#define _GNU_SOURCE
#include "team.h"

#include <errno.h>
#include <immintrin.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SHARES 4           /* pieces that a stretch is cut into, */
#define LEAST (256 << 10)  /* of at least so many bytes */
#define MOST (1 << 20)     /* and at most so many, but at least a chunk */
#define MOST_BUFFERS 1024 /* of one system call */
#define ENTRIES 32        /* pieces on their way at once */
#define RINGS 4           /* calls at once; further ones read piece after piece */
#define ENDS_EARLY (-1)

/* The system's interface to a ring, by its own numbers: headers as old as those that wheels are built with lack it. */
#define SETUP 425
#define ENTER 426
#define READV 1
#define WAIT 1           /* a flag of ENTER */
#define ONE_MAPPING 1u   /* features that are needed: both queues in one mapping, */
#define NEVER_DROPPED 2u /* and no result is lost */
#define QUEUES 0
#define REQUESTS 0x10000000

typedef struct {
    uint32_t entries, results, flags, thread[2], features, queue, reserved[3];
    struct {
        uint32_t head, tail, mask, entries, flags, dropped, order, reserved;
        uint64_t address;
    } asked;
    struct {
        uint32_t head, tail, mask, entries, overflow, results, flags, reserved;
        uint64_t address;
    } answered;
} ring_setup;

typedef struct {
    uint8_t what, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, address;
    uint32_t count, how;
    uint64_t number, more[3];
} request;

typedef struct {
    uint64_t number;
    int32_t moved;
    uint32_t flags;
} answer;

_Static_assert(sizeof(ring_setup) == 120 && sizeof(request) == 64 && sizeof(answer) == 16, "as the system lays them out");

typedef struct {
    int64_t first, stop; /* chunks, in the order of the file */
    int64_t offset, bytes;
    struct iovec *buffers;
    int count;
} piece;

static uint8_t *chunk_at(const afterglow_reading *reading, int64_t i) {
    return (uint8_t *)reading->arena + i / reading->blocks * reading->plane_bytes +
           reading->slots[i % reading->blocks] * reading->chunk_bytes;
}

/* ---------------------------------------------------------------------------------------------------------- checksums */

TARGET("sse4.2")

/* CRC32C of `lanes` chunks side by side, a constant of at most 3: a step takes three cycles, and each cycle another can begin. */
INLINE void sum_chunks(const uint8_t *const *chunks, int64_t bytes, uint32_t *sums, int lanes) {
    uint64_t sum[3] = {UINT32_MAX, UINT32_MAX, UINT32_MAX}, word;
    int64_t at = 0;
    for (; at + 8 <= bytes; at += 8)
UNROLL(3)
        for (int lane = 0; lane < lanes; lane++) {
            memcpy(&word, chunks[lane] + at, sizeof word);
            sum[lane] = _mm_crc32_u64(sum[lane], word);
        }
    for (; at < bytes; at++)
UNROLL(3)
        for (int lane = 0; lane < lanes; lane++) sum[lane] = _mm_crc32_u8((uint32_t)sum[lane], chunks[lane][at]);
    for (int lane = 0; lane < lanes; lane++) sums[lane] = ~(uint32_t)sum[lane];
}

static void sum_up(const afterglow_reading *reading, int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop;) {
        const uint8_t *chunks[3];
        const int lanes = stop - i >= 3 ? 3 : 1;
        for (int lane = 0; lane < lanes; lane++) chunks[lane] = chunk_at(reading, i + lane);
        if (lanes == 3)
            sum_chunks(chunks, reading->chunk_bytes, (uint32_t *)reading->sums + i, 3);
        else
            sum_chunks(chunks, reading->chunk_bytes, (uint32_t *)reading->sums + i, 1);
        i += lanes;
    }
}

END_TARGET

/* -------------------------------------------------------------------------------------------------------------- pieces */

static void add(piece *into, void *memory, int64_t bytes) {
    struct iovec *last = into->buffers + into->count - 1;
    into->bytes += bytes;
    if (into->count && (uint8_t *)last->iov_base + last->iov_len == memory)
        last->iov_len += bytes;
    else
        into->buffers[into->count++] = (struct iovec){memory, bytes};
}

/* Cuts the stretch; `buffers` has room for one buffer a chunk and one more. Returns the number of pieces. */
static int64_t cut(const afterglow_reading *reading, piece *pieces, struct iovec *buffers) {
    const int64_t chunks = reading->planes * reading->blocks;
    const int64_t share = (reading->head_bytes + chunks * reading->chunk_bytes) / SHARES;
    const int64_t most = share < LEAST ? LEAST : share < MOST ? share : MOST;
    int64_t count = 0, next = 0, offset = reading->offset;
    while (next < chunks || !count) {
        piece *now = pieces + count++;
        *now = (piece){.first = next, .offset = offset, .buffers = buffers};
        if (count == 1 && reading->head_bytes) add(now, (void *)reading->head, reading->head_bytes);
        while (next < chunks && (now->bytes < most || now->first == next) && now->count < MOST_BUFFERS)
            add(now, chunk_at(reading, next++), reading->chunk_bytes);
        now->stop = next;
        buffers += now->count;
        offset += now->bytes;
    }
    return count;
}

/* Reads what is left of a piece of which `done` bytes are there. Returns 0, an error number, or ENDS_EARLY. */
static int read_rest(int fd, piece *what, int64_t done) {
    struct iovec *left = what->buffers;
    int count = what->count;
    for (int64_t moved = done;;) {
        while (count && moved >= (int64_t)left->iov_len) moved -= left->iov_len, left++, count--;
        if (!count) return 0;
        left->iov_base = (uint8_t *)left->iov_base + moved, left->iov_len -= moved;
        do moved = preadv(fd, left, count, what->offset + done);
        while (moved < 0 && errno == EINTR);
        if (moved <= 0) return moved ? errno : ENDS_EARLY;
        done += moved;
    }
}

/* --------------------------------------------------------------------------------------------------------------- rings */

typedef struct {
    int fd;
    pid_t owner; /* a child process shares its parent's rings, and leaves them alone */
    _Atomic uint32_t *ask, *seen, *answered; /* counted up: requests by this side, answers by this side and by the system */
    uint32_t request_mask, answer_mask;
    uint32_t *order;
    request *requests;
    answer *answers;
} ring;

static struct {
    atomic_flag taken;
    int state; /* 0: not asked for yet, 1: there, -1: refused */
    ring ring;
} rings[RINGS]; /* all zero: none is taken */

static int make_ring(ring *into) {
    ring_setup setup = {0};
    const int fd = (int)syscall(SETUP, ENTRIES, &setup);
    if (fd < 0) return -1;
    const size_t asked = setup.asked.order + setup.entries * sizeof(uint32_t);
    const size_t answered = setup.answered.results + setup.results * sizeof(answer);
    const uint32_t needed = ONE_MAPPING | NEVER_DROPPED;
    uint8_t *queues = MAP_FAILED, *requests = MAP_FAILED;
    if ((setup.features & needed) == needed) {
        const int flags = MAP_SHARED | MAP_POPULATE, access = PROT_READ | PROT_WRITE;
        queues = mmap(0, asked > answered ? asked : answered, access, flags, fd, QUEUES);
        requests = mmap(0, setup.entries * sizeof(request), access, flags, fd, REQUESTS);
    }
    if (queues == MAP_FAILED || requests == MAP_FAILED) {
        close(fd); /* what was mapped stays: this is tried once a ring */
        return -1;
    }
    *into = (ring){.fd = fd,
                   .owner = getpid(),
                   .ask = (void *)(queues + setup.asked.tail),
                   .seen = (void *)(queues + setup.answered.head),
                   .answered = (void *)(queues + setup.answered.tail),
                   .request_mask = setup.entries - 1,
                   .answer_mask = setup.results - 1,
                   .order = (void *)(queues + setup.asked.order),
                   .requests = (void *)requests,
                   .answers = (void *)(queues + setup.answered.results)};
    return 1;
}

/* Returns the number of a ring that is the caller's until it clears `taken`, or -1. */
static int take_ring(void) {
    for (int i = 0; i < RINGS; i++) {
        if (atomic_flag_test_and_set(&rings[i].taken)) continue;
        if (!rings[i].state) rings[i].state = make_ring(&rings[i].ring);
        if (rings[i].state > 0 && rings[i].ring.owner == getpid()) return i;
        atomic_flag_clear(&rings[i].taken);
    }
    return -1;
}

static void ask(ring *by, int fd, const piece *what, int64_t number) {
    const uint32_t tail = atomic_load_explicit(by->ask, memory_order_relaxed), at = tail & by->request_mask;
    by->requests[at] = (request){.what = READV,
                                 .fd = fd,
                                 .offset = (uint64_t)what->offset,
                                 .address = (uint64_t)(uintptr_t)what->buffers,
                                 .count = (uint32_t)what->count,
                                 .number = (uint64_t)number};
    by->order[at] = at;
    atomic_store_explicit(by->ask, tail + 1, memory_order_release);
}

/* Reads what is left of a piece, and sums its chunks. Returns what `read_rest` does. */
static int finish(int fd, const afterglow_reading *reading, piece *what, int64_t done) {
    const int fault = read_rest(fd, what, done);
    if (!fault) sum_up(reading, what->first, what->stop);
    return fault;
}

/* Reads all pieces by ring `number`. What the ring does not read is read without it: some files and limits refuse a ring alone.
   After a fault no further piece is begun, but those on their way are waited for. */
static int read_by_ring(int number, int fd, const afterglow_reading *reading, piece *pieces, int64_t count) {
    const struct timespec pause = {.tv_nsec = 50000};
    ring *by = &rings[number].ring;
    int64_t next = 0, queued = 0, flying = 0; /* asked for; of these not taken over yet, and on their way */
    int fault = 0;
    while (flying || queued || (next < count && !fault)) {
        for (; !fault && next < count && queued + flying < ENTRIES; next++, queued++) ask(by, fd, pieces + next, next);
        const int taken = (int)syscall(ENTER, by->fd, queued, 1, WAIT, 0, 0);
        if (taken > 0) queued -= taken, flying += taken;
        if (taken < 0 && errno != EINTR) {
            if (flying) {
                nanosleep(&pause, 0);
            } else { /* the requests that the system does not take are taken back */
                if (errno != EAGAIN && errno != EBUSY && errno != ENOMEM) rings[number].state = -1;
                atomic_fetch_sub(by->ask, (uint32_t)queued);
                for (next -= queued; next < count && !fault; next++) fault = finish(fd, reading, pieces + next, 0);
                return fault;
            }
        }
        for (uint32_t seen = atomic_load_explicit(by->seen, memory_order_relaxed);
             seen != atomic_load_explicit(by->answered, memory_order_acquire);) {
            const answer found = by->answers[seen & by->answer_mask];
            atomic_store_explicit(by->seen, ++seen, memory_order_release);
            flying--;
            if (!fault) fault = finish(fd, reading, pieces + found.number, found.moved < 0 ? 0 : found.moved);
        }
    }
    return fault;
}

int afterglow_read(int fd, const afterglow_reading *reading, int by_ring) {
    const int64_t chunks = reading->planes * reading->blocks;
    piece *pieces = malloc((chunks + 1) * (sizeof *pieces + sizeof(struct iovec)));
    if (!pieces) return ENOMEM;
    const int64_t count = cut(reading, pieces, (struct iovec *)(pieces + chunks + 1));
    const int number = by_ring && count > 1 ? take_ring() : -1;
    int fault = 0;
    if (number >= 0) {
        fault = read_by_ring(number, fd, reading, pieces, count);
        atomic_flag_clear(&rings[number].taken);
    } else {
        for (int64_t i = 0; i < count && !fault; i++) fault = finish(fd, reading, pieces + i, 0);
    }
    free(pieces);
    return fault;
}

void afterglow_sum(const afterglow_reading *reading) { sum_up(reading, 0, reading->planes * reading->blocks); }
