/* Pooled lookups of a few samples in packed tables, without a tensor on the way: what a small request costs around
   FBGEMM's operator is several times what its rows do. The sums are FBGEMM's, in its order. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "_bags.h"
#include "_half.h"

#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#else
#define INLINE inline
#endif

#define QPARAM_BYTES 4
#define AHEAD 48 /* ids whose rows are asked for before they are needed */
#define CHUNK 128 /* codes of less than a byte that are spread out at a time */
#define LONG_WORK 65536 /* floats; what takes longer lets other Python threads run */

/* A table, or columns of one, in the buffer. `bits` of a code; 16 and 32 are floats. */
typedef struct {
    int64_t offset, rows, row_bytes, width, bits, mean;
} Piece;

/* One feature of a request in one piece: `key` is its place in the request, `column` the first of the answer's. */
typedef struct {
    int64_t key, piece, column;
} Step;

/* The samples that are wanted of each key, and where their ids begin and end. */
typedef struct {
    int64_t first, samples, *starts, *ends;
} Part;

/* `width` and `bits` of a table, as constants where the caller has them: then a row's sum stays in registers. */
INLINE static void add_row(const uint8_t *row, int64_t width, int64_t bits, float *restrict sum) {
    if (bits == 32) {
        for (int64_t i = 0; i < width; i++) {
            float value;
            memcpy(&value, row + 4 * i, 4);
            sum[i] += value;
        }
        return;
    }
    if (bits == 16) {
        for (int64_t i = 0; i < width; i++) {
            uint16_t half;
            memcpy(&half, row + 2 * i, 2);
            sum[i] += from_half(half);
        }
        return;
    }
    uint16_t half_scale, half_bias;
    memcpy(&half_scale, row, 2);
    memcpy(&half_bias, row + 2, 2);
    const float scale = from_half(half_scale), bias = from_half(half_bias);
    const uint8_t *codes = row + QPARAM_BYTES;
    const int per_byte = (int)(8 / bits), shift = (int)bits;
    if (bits == 8) {
        for (int64_t i = 0; i < width; i++)
            sum[i] = fmaf((float)codes[i], scale, sum[i] + bias);
        return;
    }
    int32_t whole[CHUNK];
    for (int64_t first = 0; first < width; first += CHUNK) {
        const int64_t count = width - first < CHUNK ? width - first : CHUNK;
        const uint8_t *packed = codes + first / per_byte;
        for (int64_t i = 0; i < (count + per_byte - 1) / per_byte; i++)
            for (int k = 0; k < per_byte; k++)
                whole[per_byte * i + k] = (packed[i] >> (shift * k)) & ((1 << shift) - 1);
        for (int64_t i = 0; i < count; i++)
            sum[first + i] = fmaf((float)whole[i], scale, sum[first + i] + bias);
    }
}

/* All bags of one feature in one piece, whose ids are rows of it. */
INLINE static void pool_step(const uint8_t *table, const Piece *piece, int64_t width, int64_t bits, const Bags *bags,
                             const Part *part, int64_t key, float *restrict sum, uint8_t *out, int64_t columns) {
    const int64_t row_bytes = piece->row_bytes, last = part->ends[key];
    int64_t at = part->starts[key];
    for (int64_t b = 0; b < part->samples; b++) {
        const int64_t count = length_at(bags, key * bags->batch + part->first + b), end = at + count;
        for (int64_t i = 0; i < width; i++)
            sum[i] = 0.0f;
        for (; at < end; at++) {
            if (at + AHEAD < last)
                __builtin_prefetch(table + id_at(bags, at + AHEAD) * row_bytes);
            add_row(table + id_at(bags, at) * row_bytes, width, bits, sum);
        }
        if (piece->mean && count > 1) {
            const float inverse = 1.0f / (float)count;
            for (int64_t i = 0; i < width; i++)
                sum[i] *= inverse;
        }
        memcpy(out + 4 * b * columns, sum, (size_t)width * sizeof *sum);
    }
}

#define POOL(WIDTH, BITS) pool_step(table, piece, WIDTH, BITS, bags, part, key, sum, into, columns)
#define POOL_FIXED(WIDTH, BITS) \
    case WIDTH: { \
        float fixed[WIDTH]; \
        pool_step(table, piece, WIDTH, BITS, bags, part, key, fixed, into, columns); \
        break; \
    }
#define POOL_WIDTHS(BITS) \
    switch (piece->width) { \
        POOL_FIXED(8, BITS) \
        POOL_FIXED(16, BITS) \
        POOL_FIXED(32, BITS) \
        POOL_FIXED(64, BITS) \
        POOL_FIXED(128, BITS) \
    default: \
        POOL(piece->width, BITS); \
    }

/* Find a part's ids, behind find_starts. */
static void narrow(const Bags *bags, Part *part) {
    for (int64_t key = 0; key < bags->keys; key++) {
        int64_t at = part->starts[key], b = key * bags->batch;
        for (const int64_t end = b + part->first; b < end; b++)
            at += length_at(bags, b);
        part->starts[key] = at;
        for (const int64_t end = b + part->samples; b < end; b++)
            at += length_at(bags, b);
        part->ends[key] = at;
    }
}

/* Whether every id is a row of its table. `out`: float32 [samples, columns], wherever it lies; `sum`: the widest piece. */
WIDE static int pool(const uint8_t *buffer, const Piece *pieces, const Step *steps, int64_t num_steps, const Bags *bags,
                     const Part *part, float *restrict sum, uint8_t *out, int64_t columns) {
    for (int64_t s = 0; s < num_steps; s++) {
        const Piece *piece = pieces + steps[s].piece;
        const uint8_t *table = buffer + piece->offset;
        uint8_t *into = out + 4 * steps[s].column;
        const int64_t key = steps[s].key, at = part->starts[key], last = part->ends[key];
        for (int64_t i = at; i < last; i++) { /* before any row is read */
            int64_t id = id_at(bags, i);
            if (id < 0 || id >= piece->rows)
                return 0;
            if (i < at + AHEAD)
                __builtin_prefetch(table + id * piece->row_bytes);
        }
        if (piece->bits == 8)
            POOL_WIDTHS(8)
        else if (piece->bits == 4)
            POOL_WIDTHS(4)
        else
            POOL(piece->width, piece->bits);
    }
    return 1;
}

static int check_pieces(const Piece *pieces, int64_t count, int64_t buffer_bytes) {
    for (int64_t p = 0; p < count; p++) {
        const Piece *piece = pieces + p;
        const int64_t bits = piece->bits;
        if ((bits != 2 && bits != 4 && bits != 8 && bits != 16 && bits != 32) || piece->width < 1 ||
            piece->width > 1 << 24 || piece->rows < 0 || piece->offset < 0 || piece->offset > buffer_bytes ||
            piece->row_bytes < (bits < 16 ? QPARAM_BYTES : 0) + (piece->width * bits + 7) / 8 ||
            piece->rows > (buffer_bytes - piece->offset) / piece->row_bytes)
            return 0;
    }
    return 1;
}

static int check_steps(const Step *steps, int64_t count, const Piece *pieces, int64_t num_pieces, int64_t keys,
                       int64_t columns, int64_t *widest) {
    *widest = 1;
    for (int64_t s = 0; s < count; s++) {
        const Step *step = steps + s;
        if (step->key < 0 || step->key >= keys || step->piece < 0 || step->piece >= num_pieces || step->column < 0 ||
            step->column > columns - pieces[step->piece].width)
            return 0;
        *widest = pieces[step->piece].width > *widest ? pieces[step->piece].width : *widest;
    }
    return 1;
}

/* The context of a request: bags of one sample, whose sums go with every sample. */
typedef struct {
    Py_buffer steps;
    Bags bags;
} Context;

/* Take a context's places, as `pool` has them; raises. `steps` is to be released where it has an obj. */
static int read_context(PyObject *given, const Py_buffer *data, const Piece *pieces, int64_t num_pieces, Py_ssize_t columns,
                        Context *context, int64_t *widest) {
    PyObject *steps;
    Py_ssize_t lengths_at, values_at, ids, keys;
    int wide;
    int64_t mine;
    if (!PyArg_ParseTuple(given, "Onnnpn", &steps, &lengths_at, &values_at, &ids, &wide, &keys) ||
        PyObject_GetBuffer(steps, &context->steps, PyBUF_SIMPLE) < 0)
        return 0;
    const int64_t num_steps = context->steps.len / (Py_ssize_t)sizeof(Step);
    if (keys < 0 || keys > PY_SSIZE_T_MAX / 64 || ids < 0 || ids > PY_SSIZE_T_MAX / 64 || lengths_at < 0 ||
        lengths_at > data->len || 4 * keys > data->len - lengths_at || values_at < 0 || values_at > data->len ||
        (wide ? 8 : 4) * ids > data->len - values_at ||
        !check_steps(context->steps.buf, num_steps, pieces, num_pieces, keys, columns, &mine)) {
        PyErr_SetString(PyExc_ValueError, "pool: places of the context outside the bytes or the answer");
        return 0;
    }
    *widest = mine > *widest ? mine : *widest;
    context->bags = (Bags){(const uint8_t *)data->buf + lengths_at, (const uint8_t *)data->buf + values_at, keys, ids, 1,
                           wide, 4};
    return 1;
}

/* Fill a context's columns of all samples; whether every id is a row of its table. `starts`: [keys + 1]. */
static int pool_context(const uint8_t *buffer, const Piece *pieces, const Context *context, int64_t *starts, float *sum,
                        uint8_t *out, int64_t samples, int64_t columns) {
    const Step *steps = context->steps.buf;
    const int64_t num_steps = context->steps.len / (Py_ssize_t)sizeof *steps;
    const Part part = {0, 1, starts, starts + 1};
    if (!find_starts(&context->bags, starts) ||
        (samples && !pool(buffer, pieces, steps, num_steps, &context->bags, &part, sum, out, columns)))
        return 0;
    for (int64_t b = 1; b < samples; b++)
        for (int64_t s = 0; s < num_steps; s++)
            memcpy(out + 4 * (b * columns + steps[s].column), out + 4 * steps[s].column, 4 * pieces[steps[s].piece].width);
    return 1;
}

PyDoc_STRVAR(pool_doc,
             "pool(buffer, pieces, steps, data, lengths_at, values_at, ids, wide, keys, batch, columns, into, length_bytes=4,\n"
             "     first=0, samples=-1, context=None)\n"
             "--\n\n"
             "Pooled rows of bags whose lengths (int32 [keys, batch]) and ids (int64 [ids], or int32 unless `wide`) lie\n"
             "in the bytes `data` from those places on. `length_bytes` 1: lengths are uint8; 0: each bag holds one id.\n\n"
             "pieces: int64 [P, 6], offset, rows, bytes of a row, width, bits and mean of tables in `buffer`.\n"
             "steps: int64 [S, 3], place among the keys, piece, first column of the answer's `columns`.\n"
             "into: a writable float32 buffer of [samples, columns], or bytes that the answer begins with.\n"
             "first, samples: which of the batch are wanted, all of them unless both are given. Of the others no id is looked\n"
             "at, and other Python threads run meanwhile.\n"
             "context: of features that go with every sample: (steps, lengths_at, values_at, ids, wide, keys), of one bag each.\n\n"
             "Returns the answer as bytes, or True when it was written `into`; None when an id is no row of its table or\n"
             "the lengths are not those of so many ids. Columns that no step fills are left as they are, 0 in bytes.\n"
             "Raises ValueError for places outside `data` or `buffer`.");

static PyObject *pool_method(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *buffer_object, *pieces_object, *steps_object, *data_object, *into, *beside = Py_None, *result = NULL,
                                                                                          *answer = NULL;
    Py_ssize_t lengths_at, values_at, ids, keys, batch, columns, first = 0, samples = -1;
    int wide, length_bytes = 4;
    if (!PyArg_ParseTuple(args, "OOOOnnnpnnnO|innO", &buffer_object, &pieces_object, &steps_object, &data_object,
                          &lengths_at, &values_at, &ids, &wide, &keys, &batch, &columns, &into, &length_bytes, &first,
                          &samples, &beside))
        return NULL;
    const int is_part = samples != -1;
    if (!is_part)
        samples = batch;
    Py_buffer buffer, pieces_view, steps_view, data, out = {0};
    Context context = {0};
    if (PyObject_GetBuffer(buffer_object, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(pieces_object, &pieces_view, PyBUF_SIMPLE) < 0)
        goto release_buffer;
    if (PyObject_GetBuffer(steps_object, &steps_view, PyBUF_SIMPLE) < 0)
        goto release_pieces;
    if (PyObject_GetBuffer(data_object, &data, PyBUF_SIMPLE) < 0)
        goto release_steps;

    const Piece *pieces = pieces_view.buf;
    const Step *steps = steps_view.buf;
    const int64_t num_pieces = pieces_view.len / (Py_ssize_t)sizeof *pieces;
    const int64_t num_steps = steps_view.len / (Py_ssize_t)sizeof *steps;
    const Py_ssize_t most = PY_SSIZE_T_MAX / 64;
    int64_t widest;
    if (keys < 0 || batch < 1 || columns < 0 || ids < 0 || ids > most || (keys && batch > most / keys) ||
        (columns && batch > most / columns) || first < 0 || first > batch || samples < 0 || samples > batch - first ||
        lengths_at < 0 || lengths_at > data.len ||
        (length_bytes != 0 && length_bytes != 1 && length_bytes != 4) ||
        length_bytes * keys * batch > data.len - lengths_at || values_at < 0 || values_at > data.len ||
        (wide ? 8 : 4) * ids > data.len - values_at || !check_pieces(pieces, num_pieces, buffer.len) ||
        !check_steps(steps, num_steps, pieces, num_pieces, keys, columns, &widest)) {
        PyErr_SetString(PyExc_ValueError, "pool: places outside the bytes, the buffer or the answer");
        goto release_data;
    }
    if (beside != Py_None && !read_context(beside, &data, pieces, num_pieces, columns, &context, &widest))
        goto release_data;
    const Py_ssize_t floats = samples * columns;
    uint8_t *target;
    if (PyBytes_Check(into)) {
        const Py_ssize_t head = PyBytes_Size(into);
        answer = PyBytes_FromStringAndSize(NULL, head + 4 * floats);
        if (answer == NULL)
            goto release_data;
        target = (uint8_t *)PyBytes_AsString(answer);
        memcpy(target, PyBytes_AsString(into), (size_t)head);
        target += head;
        memset(target, 0, 4 * (size_t)floats);
    } else {
        if (PyObject_GetBuffer(into, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
            goto release_data;
        if (out.len != 4 * floats) {
            PyErr_SetString(PyExc_ValueError, "pool: the answer is not of [samples, columns] float32");
            goto release_out;
        }
        target = out.buf;
    }
    const Py_ssize_t spans = 2 * keys + 1 + context.bags.keys + 1;
    int64_t *starts = PyMem_Malloc((size_t)spans * sizeof *starts + (size_t)widest * sizeof(float));
    if (starts == NULL) {
        PyErr_NoMemory();
        goto release_out;
    }
    const Bags bags = {(const uint8_t *)data.buf + lengths_at, (const uint8_t *)data.buf + values_at, keys, ids, batch,
                       wide, length_bytes};
    Part part = {first, samples, starts, is_part ? starts + keys + 1 : starts + 1};
    int64_t *beside_starts = starts + 2 * keys + 1;
    float *sum = (float *)(starts + spans);
    int whole;
    if (is_part || ids * widest > LONG_WORK) {
        Py_BEGIN_ALLOW_THREADS
        whole = find_starts(&bags, starts);
        if (whole && is_part)
            narrow(&bags, &part);
        whole = whole && pool(buffer.buf, pieces, steps, num_steps, &bags, &part, sum, target, columns) &&
                (beside == Py_None ||
                 pool_context(buffer.buf, pieces, &context, beside_starts, sum, target, samples, columns));
        Py_END_ALLOW_THREADS
    } else {
        whole = find_starts(&bags, starts) &&
                pool(buffer.buf, pieces, steps, num_steps, &bags, &part, sum, target, columns) &&
                (beside == Py_None ||
                 pool_context(buffer.buf, pieces, &context, beside_starts, sum, target, samples, columns));
    }
    PyMem_Free(starts);
    result = !whole ? Py_None : answer != NULL ? answer : Py_True;
    Py_INCREF(result);
release_out:
    if (out.obj != NULL)
        PyBuffer_Release(&out);
release_data:
    if (context.steps.obj != NULL)
        PyBuffer_Release(&context.steps);
    PyBuffer_Release(&data);
release_steps:
    PyBuffer_Release(&steps_view);
release_pieces:
    PyBuffer_Release(&pieces_view);
release_buffer:
    PyBuffer_Release(&buffer);
    Py_XDECREF(answer);
    return result;
}

static PyMethodDef methods[] = {{"pool", pool_method, METH_VARARGS, pool_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_tables", "Pooled lookups in packed tables, from bytes.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tables(void) { return PyModuleDef_Init(&definition); }
