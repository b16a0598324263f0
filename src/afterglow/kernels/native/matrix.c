/* Products of rows with a matrix, float32: as fast as memory is read for a dozen rows, and as fast as can be multiplied beyond.

   The matrix is kept in panels of as many outputs as two vectors have lanes, inputs one after another, so that a panel is read
   in one run, and a tile of rows by a panel stays in registers. Each number is summed up in the same order whatever
   other rows there are: a row's product does not depend on its batch.

   Built and called as segments.c is. */

#include "team.h"

#include "functions.h"

#define AHEAD 1024  /* floats of a panel that are asked for ahead of time (8 rows of 768 inputs: 0.48 to 0.35 ms) */
#define RUN 512     /* inputs that are added up before they meet the sum of those before: errors stay small */
#define CHUNK 240   /* rows that pass a panel before the next one's turn: they stay in the third cache */
#define ALONE 65536 /* to wake a thread takes about as long as so many products */
#define MOST_ROWS 12

/* out[row][0 .. 2 V) = bias + x[row] . panel, or that much `more`, for `rows` rows, `x_stride` and `out_stride` floats apart. */
typedef void tile(const float *x, int64_t x_stride, const float *panel, int64_t inputs, const float *bias, int more, float *out,
                  int64_t out_stride, int64_t rows);

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#define V 16
#include "vectors.h"
#include "panel.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define V 8
#include "vectors.h"
#include "panel.h"
#pragma GCC pop_options

/* Rows from `x` on that pass the panels together. */
typedef struct {
    tile *some;
    const float *x;
    int64_t x_stride, rows, size; /* `size` of them in a tile */
    const float *panels, *bias;
    int64_t inputs, outputs, lanes;
    int more;
    float *out, *copy; /* `copy`: where they are copied to, `apart` floats apart */
    int64_t apart;
} passing;

static void copied(const void *what, int64_t from, int64_t to, int desk) {
    const passing *p = what;
    (void)desk;
    for (int64_t row = from; row < to; row++) memcpy(p->copy + row * p->apart, p->x + row * p->x_stride, p->inputs * sizeof *p->x);
}

static void passed(const void *what, int64_t from, int64_t to, int desk) {
    const passing p = *(const passing *)what;
    const float *x = p.copy ? p.copy : p.x;
    const int64_t stride = p.copy ? p.apart : p.x_stride;
    (void)desk;
    for (int64_t i = from; i < to; i++) {
        const float *panel = p.panels + i * p.inputs * p.lanes, *bias = p.bias ? p.bias + i * p.lanes : 0;
        const int64_t left = p.outputs - i * p.lanes;
        for (int64_t row = 0; row < p.rows; row += p.size) {
            const int64_t rows = p.rows - row < p.size ? p.rows - row : p.size;
            float *out = p.out + row * p.outputs + i * p.lanes, edge[MOST_ROWS * 2 * 16];
            if (left >= p.lanes) {
                p.some(x + row * stride, stride, panel, p.inputs, bias, p.more, out, p.outputs, rows);
                continue;
            }
            for (int64_t j = 0; p.more && j < rows; j++) memcpy(edge + j * p.lanes, out + j * p.outputs, left * sizeof *out);
            p.some(x + row * stride, stride, panel, p.inputs, bias, p.more, edge, p.lanes, rows);
            for (int64_t j = 0; j < rows; j++) memcpy(out + j * p.outputs, edge + j * p.lanes, left * sizeof *out);
        }
    }
}

/* out [rows][outputs] = x [rows][inputs] (rows `x_stride` floats apart) times the matrix in `panels`
   [outputs / (2 width), rounded up][inputs][2 width], plus `bias`, which has as many numbers as the panels have outputs, or is
   null; plus what `out` has been before, where `more` is not 0. Returns 0, or 1 where there was no memory. */
int afterglow_multiply_3(const float *x, int64_t x_stride, int64_t rows, int64_t inputs, const float *panels, int64_t outputs,
                         const float *bias, int more, float *out, int threads, int width) {
    const int64_t most = width == 16 ? MOST_ROWS : MOST_ROWS / 2, lanes = 2 * width, count = (outputs + lanes - 1) / lanes;
    const int worth = count * lanes * inputs * (1 + rows / most) >= ALONE;
    passing p = {.some = width == 16 ? some_16 : some_8, .x_stride = x_stride, .panels = panels, .bias = bias, .more = more};
    p.inputs = inputs, p.outputs = outputs, p.lanes = lanes, p.apart = inputs + width;
    /* Rows a multiple of 4 KiB apart would all fall into the same few places of the first cache. */
    if (rows > 1 && x_stride % 1024 == 0) {
        p.copy = malloc((rows < CHUNK ? rows : CHUNK) * p.apart * sizeof *p.copy);
        if (!p.copy) return 1;
    }
    for (int64_t first = 0; first < rows; first += CHUNK) {
        p.x = x + first * x_stride, p.out = out + first * outputs, p.rows = rows - first < CHUNK ? rows - first : CHUNK;
        const int64_t tiles = (p.rows + most - 1) / most;
        p.size = (p.rows + tiles - 1) / tiles;
        if (p.copy) team_share(copied, &p, p.rows, 16, threads, worth);
        team_share(passed, &p, count, 1 + count / (16 * threads), threads, worth);
    }
    free(p.copy);
    return 0;
}
