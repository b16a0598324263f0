/* One call reads stretches of files into memory, and sums up what has come while the rest is on its way: all of an extent into slots of
   an arena, or many small parts of several extents.

   Stretches are read in pieces, into a little memory that all calls use again, so that it stays in the processor's cache. From there
   one pass sums up the chunks and carries them to their slots, past the cache. That takes no longer than to sum up what a
   device has written to the slots themselves, and devices of virtual machines, whose host copies every byte, write a third faster.

   With an io_uring the next pieces are asked for before those that have come are worked on. Not all at once: there are devices that
   report none of the requests that they have before all are done. Where the system refuses a ring (containers often do), a few threads
   read piece after piece each, or one, where there is one stretch. No call returns before the system has let go of the memory.

   Pieces are whole pages of the file, as files need that are open for direct transfers, wherever stretches begin and end.

   Compiled and called as segments.c is. */

#define _GNU_SOURCE
#include "team.h"

#include <errno.h>
#include <fcntl.h>
#include <immintrin.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define LEAST (256 << 10)       /* bytes of a piece, at least; it is half of what is left, */
#define MOST (1 << 20)          /* and at most so many, but at least a chunk */
#define MOST_ALONE (4 << 20)    /* bytes of a piece that is read while nothing else is done */
#define AHEAD 2                 /* pieces on their way at once, at least; */
#define MOST_AHEAD 16           /* at most, of small ones */
#define PLACES (2 * MOST_AHEAD) /* for those on their way, and those that have come; */
#define MEMORY (4 << 20)        /* their bytes, unless pieces are larger */
#define ENTRIES MOST_AHEAD      /* of a ring */
#define RINGS 4                 /* calls at once that have one; further ones do without */
#define THREADS 4               /* that read many stretches without a ring */
#define CARRIED (8 << 10)       /* bytes of a chunk that are carried at once, and summed up while they are in the first cache */
#define PAGE 4096
#define HUGE_PAGE (2 << 20)
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
    const afterglow_reading *of;
    int64_t first, stop;            /* chunks of the stretch, in the order of the file */
    int64_t offset, skipped, bytes; /* of these bytes from a page's beginning on, so many belong to something else */
    uint8_t *memory;
    struct iovec buffer;
} piece;

/* What a call has not cut into pieces yet: stretches from `at` on, of that one chunks from `next` on, which lie at `offset`. */
typedef struct {
    const afterglow_reading *readings;
    uint8_t *states;
    int64_t count, at, next, offset;
    int64_t bytes; /* of all that is left */
} rest;

static int64_t chunks_of(const afterglow_reading *reading) { return reading->planes * reading->blocks; }

static int64_t bytes_of(const afterglow_reading *reading) {
    return reading->head_bytes + chunks_of(reading) * reading->chunk_bytes;
}

static int64_t in_pages(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static uint8_t *chunk_at(const afterglow_reading *reading, int64_t i) {
    return (uint8_t *)reading->arena + i / reading->blocks * reading->plane_bytes + reading->places[i % reading->blocks];
}

/* ---------------------------------------------------------------------------------------------------------- checksums */

TARGET("avx2,sse4.2")

/* Copies whole vectors past the cache; `to` begins at one. */
INLINE void stream(uint8_t *to, const uint8_t *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += sizeof(__m256i))
        _mm256_stream_si256((__m256i *)(to + at), _mm256_loadu_si256((const __m256i *)(from + at)));
}

/* CRC32C of `lanes` chunks side by side, a constant of at most 3: a step takes three cycles, and each cycle another can begin.
   `carry`, a constant: the chunks are carried to `to` as well, which begin at multiples of a vector, one lane after the other: there
   are processors whose writes past the cache are five times as slow to several places in turn. */
INLINE void sum_chunks(const uint8_t *const *chunks, uint8_t *const *to, int64_t bytes, uint32_t *sums, int lanes, int carry) {
    uint64_t sum[3] = {UINT32_MAX, UINT32_MAX, UINT32_MAX}, word;
    const int64_t whole = bytes / 64 * 64;
    for (int64_t at = 0; at < whole;) {
        const int64_t begin = at, end = whole - at < CARRIED ? whole : at + CARRIED;
        for (int lane = 0; carry && lane < lanes; lane++) stream(to[lane] + begin, chunks[lane] + begin, end - begin);
        for (; at < end; at += 64)
UNROLL(8)
            for (int i = 0; i < 64; i += 8)
UNROLL(3)
                for (int lane = 0; lane < lanes; lane++) {
                    memcpy(&word, chunks[lane] + at + i, sizeof word);
                    sum[lane] = _mm_crc32_u64(sum[lane], word);
                }
    }
    for (int lane = 0; lane < lanes; lane++) {
        if (carry) memcpy(to[lane] + whole, chunks[lane] + whole, bytes - whole);
        for (int64_t i = whole; i < bytes; i++) sum[lane] = _mm_crc32_u8((uint32_t)sum[lane], chunks[lane][i]);
        sums[lane] = ~(uint32_t)sum[lane];
    }
}

/* Sums up chunks of a stretch where they lie in the arena, or those that lie one after another at `from`, which go to the arena. */
static void sum_up(const afterglow_reading *reading, int64_t first, int64_t stop, const uint8_t *from) {
    const int64_t bytes = reading->chunk_bytes;
    for (int64_t i = first; i < stop;) {
        const uint8_t *chunks[3];
        uint8_t *to[3];
        uint32_t *sums = (uint32_t *)reading->sums + i;
        const int lanes = stop - i >= 3 ? 3 : 1;
        uintptr_t addresses = 0;
        for (int lane = 0; lane < lanes; lane++) {
            to[lane] = chunk_at(reading, i + lane);
            chunks[lane] = from ? from + (i + lane - first) * bytes : to[lane];
            addresses |= (uintptr_t)to[lane];
        }
        const int vectors = !(addresses % sizeof(__m256i));
        for (int lane = 0; from && !vectors && lane < lanes; lane++) memcpy(to[lane], chunks[lane], bytes);
        if (lanes == 3 && from && vectors)
            sum_chunks(chunks, to, bytes, sums, 3, 1);
        else if (lanes == 3)
            sum_chunks(chunks, to, bytes, sums, 3, 0);
        else if (from && vectors)
            sum_chunks(chunks, to, bytes, sums, 1, 1);
        else
            sum_chunks(chunks, to, bytes, sums, 1, 0);
        i += lanes;
    }
    _mm_sfence(); /* what went past the cache is there before anything that this thread writes next */
}

END_TARGET

/* -------------------------------------------------------------------------------------------------------------- pieces */

/* Begins the next stretch that is still wanted. Returns 0 if there is none. */
static int begin(rest *left) {
    for (; left->at < left->count; left->at++) {
        const afterglow_reading *reading = left->readings + left->at;
        uint8_t *state = left->states ? left->states + left->at : 0, found = AFTERGLOW_WANTED;
        left->next = 0, left->offset = reading->offset;
        if (!state || __atomic_compare_exchange_n(state, &found, AFTERGLOW_BEGUN, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return 1;
        if (found == AFTERGLOW_BEGUN) return 1; /* by a call that has failed */
        __atomic_store_n(state, AFTERGLOW_LEFT_OUT, __ATOMIC_RELAXED);
        left->bytes -= bytes_of(reading);
    }
    return 0;
}

/* Cuts the next piece off what is left; a stretch's first one brings its head. `most`: bytes, or a chunk more. Returns 0 if nothing is
   left. */
static int cut(rest *left, piece *into, int64_t most) {
    if (!left->next && !begin(left)) return 0;
    const afterglow_reading *reading = into->of = left->readings + left->at;
    const int64_t head = left->next ? 0 : reading->head_bytes, count = (most - head) / reading->chunk_bytes;
    const int64_t stop = left->next + (count > 1 ? count : 1), chunks = chunks_of(reading);
    into->first = left->next;
    into->stop = left->next = stop < chunks ? stop : chunks;
    const int64_t bytes = head + (into->stop - into->first) * reading->chunk_bytes;
    into->skipped = left->offset % PAGE;
    into->offset = left->offset - into->skipped;
    into->bytes = into->skipped + bytes;
    left->offset += bytes;
    left->bytes -= bytes;
    if (left->next == chunks) left->next = 0, left->at++;
    return 1;
}

/* The bytes of the next piece where a ring reads it: the smaller the last one, the less is left to do when it has come. */
static int64_t half(const rest *left) {
    const int64_t bytes = left->bytes / 2;
    return bytes < LEAST ? LEAST : bytes < MOST ? bytes : MOST;
}

/* The memory, in whole pages, that pieces of a reading take which are cut at `most` bytes. */
static int64_t room_of(const afterglow_reading *reading, int64_t most) {
    const int64_t least = reading->head_bytes + reading->chunk_bytes, size = bytes_of(reading), longest = least > most ? least : most;
    const int anywhere = (reading->offset | reading->head_bytes | reading->chunk_bytes) % PAGE != 0; /* in a page, pieces begin */
    return in_pages((longest < size ? longest : size) + (anywhere ? PAGE : 0));
}

/* Reads what is left of a piece, whose first `done` bytes are there, and carries its chunks to their places. Returns 0, an error number,
   or ENDS_EARLY. */
static int finish(const piece *what, int64_t done) {
    const afterglow_reading *reading = what->of;
    const uint8_t *from = what->memory + what->skipped;
    const int64_t head = what->first ? 0 : reading->head_bytes, bytes = in_pages(what->bytes);
    while (done < what->bytes) {
        const int64_t moved = pread((int)reading->fd, what->memory + done, bytes - done, what->offset + done);
        if (moved > 0) done += moved;
        if (!moved) return ENDS_EARLY;
        if (moved < 0 && errno != EINTR) return errno;
    }
    if (head && reading->head) memcpy((void *)reading->head, from, head);
    sum_up(reading, what->first, what->stop, from + head);
    return 0;
}

/* What the threads of a call share. */
typedef struct {
    pthread_mutex_t cutting;
    rest *left;
    int64_t most;
    int fault;
} shared;

/* What one of them has. */
typedef struct {
    shared *all;
    uint8_t *memory;
    pthread_t thread;
} reader;

/* Reads piece after piece until none is left, or one cannot be read. */
static void *read_pieces(void *by) {
    const reader *self = by;
    shared *all = self->all;
    piece now = {.memory = self->memory};
    int fault = 0, more;
    do {
        pthread_mutex_lock(&all->cutting);
        if (fault && !all->fault) all->fault = fault;
        more = !all->fault && cut(all->left, &now, all->most);
        pthread_mutex_unlock(&all->cutting);
        if (more) fault = finish(&now, 0);
    } while (more);
    return 0;
}

/* Reads all that is left without a ring, by as many threads as there are `places` in memory, of `room` bytes each. Returns what `finish`
   does. */
static int read_rest(rest *left, uint8_t *memory, int64_t room, int64_t most, int places) {
    shared all = {.cutting = PTHREAD_MUTEX_INITIALIZER, .left = left, .most = most};
    reader readers[THREADS];
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_BLOCK, &every, &before); /* signals are left to the program's own threads */
    int helpers = 0;
    for (int i = 0; i < places; i++) readers[i] = (reader){.all = &all, .memory = memory + i * room};
    while (helpers < places - 1 && !pthread_create(&readers[helpers + 1].thread, 0, read_pieces, readers + helpers + 1)) helpers++;
    pthread_sigmask(SIG_SETMASK, &before, 0);
    read_pieces(readers);
    for (int i = 1; i <= helpers; i++) pthread_join(readers[i].thread, 0);
    return all.fault;
}

/* --------------------------------------------------------------------------------------------------------------- rings */

typedef struct {
    int fd;
    pid_t owner; /* a child process leaves its parent's rings alone, and makes others */
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
    uint8_t *memory; /* of so many bytes, at a huge page */
    int64_t bytes;
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

/* Returns the number of a place with memory, and perhaps a ring, that is the caller's until it clears `taken`, or -1. */
static int take_ring(void) {
    for (int i = 0; i < RINGS; i++) {
        if (atomic_flag_test_and_set(&rings[i].taken)) continue;
        const int mine = rings[i].ring.owner == getpid();
        if (!rings[i].state || (rings[i].state > 0 && !mine)) rings[i].state = make_ring(&rings[i].ring);
        return i;
    }
    return -1;
}

static void ask(ring *by, piece *what, int number) {
    const uint32_t tail = atomic_load_explicit(by->ask, memory_order_relaxed), at = tail & by->request_mask;
    what->buffer = (struct iovec){what->memory, in_pages(what->bytes)};
    by->requests[at] = (request){.what = READV,
                                 .fd = (int32_t)what->of->fd,
                                 .offset = (uint64_t)what->offset,
                                 .address = (uint64_t)(uintptr_t)&what->buffer,
                                 .count = 1,
                                 .number = (uint64_t)number};
    by->order[at] = at;
    atomic_store_explicit(by->ask, tail + 1, memory_order_release);
}

/* Reads all that is left by ring `number`, whose memory has two places of `room` bytes for each of the pieces that are asked for `ahead`.
   What the ring does not read is read without it: some files and limits refuse a ring alone. After a fault no further piece is
   begun, but those on their way are waited for. */
static int read_by_ring(int number, rest *left, int64_t room, int ahead) {
    const struct timespec pause = {.tv_nsec = 50000};
    ring *by = &rings[number].ring;
    piece pieces[PLACES];
    int idle[PLACES], queue[MOST_AHEAD], come[PLACES]; /* places: nothing in them, asked for but not taken over yet, to be worked on */
    int64_t done[PLACES];
    int idles = 2 * ahead, queued = 0, flying = 0, ready = 0, fault = 0;
    for (int i = 0; i < idles; i++) idle[i] = i, pieces[i].memory = rings[number].memory + i * room;
    for (;;) {
        while (!fault && queued + flying < ahead && cut(left, pieces + idle[idles - 1], half(left))) {
            const int place = queue[queued++] = idle[--idles];
            ask(by, pieces + place, place);
        }
        if (!queued && !flying && !ready) return fault;
        const int taken = queued || !ready ? (int)syscall(ENTER, by->fd, queued, !ready, ready ? 0 : WAIT, 0, 0) : 0;
        if (taken > 0) queued -= taken, flying += taken, memmove(queue, queue + taken, queued * sizeof *queue);
        if (taken < 0 && errno != EINTR) {
            if (flying && !ready) {
                nanosleep(&pause, 0);
            } else if (!flying) { /* the requests that the system does not take are taken back */
                if (errno != EAGAIN && errno != EBUSY && errno != ENOMEM) rings[number].state = -1;
                atomic_fetch_sub(by->ask, (uint32_t)queued);
                for (int i = 0; i < ready && !fault; i++) fault = finish(pieces + come[i], done[i]);
                for (int i = 0; i < queued && !fault; i++) fault = finish(pieces + queue[i], 0);
                return fault ? fault : read_rest(left, rings[number].memory, room, MOST, left->count > 1 ? THREADS : 1);
            }
        }
        for (; ready; idle[idles++] = come[ready])
            if (--ready, !fault) fault = finish(pieces + come[ready], done[ready]);
        for (uint32_t seen = atomic_load_explicit(by->seen, memory_order_relaxed);
             seen != atomic_load_explicit(by->answered, memory_order_acquire);) {
            const answer found = by->answers[seen & by->answer_mask];
            atomic_store_explicit(by->seen, ++seen, memory_order_release);
            come[ready] = (int)found.number, done[ready++] = found.moved < 0 ? 0 : found.moved;
            flying--;
        }
    }
}

/* Maps memory that starts at a huge page. Returns 0 if there is none. */
static uint8_t *map(int64_t bytes) {
    uint8_t *found = mmap(0, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return 0;
    const int64_t before = -(uintptr_t)found % HUGE_PAGE;
    if (before) munmap(found, before);
    munmap(found + before + bytes, HUGE_PAGE - before);
    madvise(found + before, bytes, MADV_HUGEPAGE);
    return found + before;
}

int afterglow_open(const char *path, int64_t bytes, int direct) {
    char folder[PATH_MAX];
    struct stat found;
    const size_t length = strlen(path) + 1;
    if (length > sizeof folder) return -1;
    memcpy(folder, path, length);
    for (int i = 0; i < 2; i++) {
        char *end = strrchr(folder, '/');
        if (!end) return -1;
        *end = 0;
        if (lstat(folder, &found) || !S_ISDIR(found.st_mode)) return -1;
    }
    const int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | (direct ? O_DIRECT : 0));
    if (fd < 0 || (!fstat(fd, &found) && S_ISREG(found.st_mode) && found.st_size == bytes)) return fd;
    close(fd);
    return -1;
}

int afterglow_read(const afterglow_reading *readings, int64_t count, uint8_t *states, int by_ring) {
    rest left = {.readings = readings, .states = states, .count = count};
    const int number = take_ring(), threads = count > 1 ? THREADS : 1;
    const int alone = number < 0 || !by_ring || rings[number].state < 0;
    const int64_t most = alone && threads == 1 ? MOST_ALONE : MOST;
    int64_t room = PAGE;
    for (int64_t i = 0; i < count; i++) {
        const int64_t needed = room_of(readings + i, most);
        if (needed > room) room = needed;
        left.bytes += bytes_of(readings + i);
    }
    const int64_t fit = MEMORY / room / 2;
    const int ahead = fit < AHEAD ? AHEAD : fit < MOST_AHEAD ? (int)fit : MOST_AHEAD;
    const int64_t bytes = (room * (alone ? threads : 2 * ahead) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    uint8_t *memory = number < 0 || rings[number].bytes < bytes ? map(bytes) : rings[number].memory;
    int fault = memory ? 0 : ENOMEM;
    if (memory && number >= 0 && memory != rings[number].memory) {
        if (rings[number].memory) munmap(rings[number].memory, rings[number].bytes);
        rings[number].memory = memory, rings[number].bytes = bytes;
    }
    if (!fault) fault = alone ? read_rest(&left, memory, room, most, threads) : read_by_ring(number, &left, room, ahead);
    if (number >= 0)
        atomic_flag_clear(&rings[number].taken);
    else if (memory)
        munmap(memory, bytes);
    return fault;
}

void afterglow_sum(const afterglow_reading *reading) { sum_up(reading, 0, chunks_of(reading), 0); }
