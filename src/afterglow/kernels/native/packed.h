/* Matrices in blocks: how panels of them lie in memory. Shared by packed.c and packed_blocks.c.

   A panel holds 16 outputs, block after block of all of them, and is read in one run. A block: its own scales, then its groups of 32
   inputs. A group: scales of its own, then its numbers, unsigned, as steps of [16 outputs][4 inputs]: four steps in the low halves of
   bytes and four in the high ones, then the fifth bits of eight steps (a bit for each byte of a step), then the sixth ones; or, for 8
   bits, eight steps of bytes. Scales stay as they are in the file, those of 6 bits apart, which take a byte. */

#pragma once
#include "team.h"

#define PANEL 16 /* outputs */
#define GROUP 32 /* inputs */
#define STEPS 8  /* of a group */
#define STEP 64  /* bytes */
#define ONES 0x0101010101010101ull

/* How a group's sum becomes a part of the result. */
enum {
    CENTRED,      /* scale * (number - zero), the same zero for all */
    CENTRED_WIDE, /* as well, with numbers of 8 bits */
    ABOVE,        /* scale * number + minimum */
    HALVES,       /* as CENTRED, with a scale for every 16 inputs */
    ZEROS,        /* scale * (number - zero), zeros of their own */
};

/* `wide`: bits of a number. Bytes of `head` (scales of a block) and `sub` (scales of a group) are those of 16 outputs. */
typedef struct {
    int weights, file_bytes, wide, head, sub, zero, kind;
} packed_format;

static const packed_format packed_formats[] = {
    [AFTERGLOW_Q8_0] = {32, 34, 8, 32, 0, 128, CENTRED_WIDE},
    [AFTERGLOW_Q4_0] = {32, 18, 4, 32, 0, 8, CENTRED},
    [AFTERGLOW_Q4_1] = {32, 20, 4, 64, 0, 0, ABOVE},
    [AFTERGLOW_Q5_0] = {32, 22, 5, 32, 0, 16, CENTRED},
    [AFTERGLOW_Q5_1] = {32, 24, 5, 64, 0, 0, ABOVE},
    [AFTERGLOW_Q4_K] = {256, 144, 4, 64, 32, 0, ABOVE},
    [AFTERGLOW_Q5_K] = {256, 176, 5, 64, 32, 0, ABOVE},
    [AFTERGLOW_Q6_K] = {256, 210, 6, 32, 32, 32, HALVES},
    [AFTERGLOW_MXFP4] = {32, 17, 4, 16, 0, 12, CENTRED},
    [AFTERGLOW_A4] = {32, 21, 4, 80, 0, 0, ZEROS},
    [AFTERGLOW_A8] = {32, 37, 8, 80, 0, 0, ZEROS},
};

INLINE int64_t group_bytes(packed_format f) { return f.sub + f.wide * STEP; }

INLINE int64_t block_bytes(packed_format f) { return f.head + f.weights / GROUP * group_bytes(f); }

/* Calls `macro` with the name of every format. */
#define EVERY_FORMAT(macro) \
    macro(Q8_0) macro(Q4_0) macro(Q4_1) macro(Q5_0) macro(Q5_1) macro(Q4_K) macro(Q5_K) macro(Q6_K) macro(MXFP4) macro(A4) macro(A8)
