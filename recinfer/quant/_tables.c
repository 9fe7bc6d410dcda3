/* Pooled lookups of a few samples in packed tables, without a tensor on the way: what a small request costs around
   FBGEMM's operator is several times what its rows do. The sums are FBGEMM's, in its order. And lookups of bags in tensors'
   memory, for rows that FBGEMM lacks. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_bags.h"
#include "_half.h"
#include "_row.h"

#define AHEAD 16 /* ids whose rows are prefetched ahead of their use: as many as a core keeps in flight */
#define LINE 64   /* bytes of a cache line */
#define LONG_WORK 65536 /* floats; a larger lookup releases the interpreter lock */

/* A table, or columns of one, in the buffer. */
typedef struct {
    int64_t offset, rows, row_bytes, width, format, mean;
} Piece;

/* One feature of a request in one piece: `key` is its place in the request, `column` the first of the answer's. */
typedef struct {
    int64_t key, piece, column;
} Step;

/* The requested samples of each key, and the first and last position of their ids. */
typedef struct {
    int64_t first, samples, *starts, *ends;
} Part;

/* Ask for a row's first cache lines; the machine itself follows long rows. Without a loop, which would keep the compiler from
   making vectors of the loops around it. An address, because an id that is not checked yet may give any. */
INLINE static void prefetch_row(uintptr_t row, int64_t bytes) {
    __builtin_prefetch((const void *)row);
    if (bytes > LINE)
        __builtin_prefetch((const void *)(row + LINE));
    if (bytes > 2 * LINE)
        __builtin_prefetch((const void *)(row + 2 * LINE));
}

/* `width` columns from `first` on of all bags of one feature in one piece, whose ids are rows of it. `add`: add_columns, or
   one like it. */
INLINE static void pool_step(void (*add)(const uint8_t *, int64_t, int64_t, int64_t, float *restrict), const uint8_t *table,
                             const Piece *piece, int64_t first, int64_t width, int64_t format, const Bags *bags,
                             const Part *part, int64_t key, float *restrict sum, uint8_t *out, int64_t columns) {
    const int64_t row_bytes = piece->row_bytes, last = part->ends[key];
    const int64_t begin = first ? byte_of(first, format) : 0, bytes = byte_of(first + width, format) - begin;
    int64_t at = part->starts[key];
    for (int64_t b = 0; b < part->samples; b++) {
        const int64_t count = length_at(bags, key * bags->batch + part->first + b), end = at + count;
        for (int64_t i = 0; i < width; i++)
            sum[i] = 0.0f;
        for (; at < end; at++) {
            if (at + AHEAD < last)
                prefetch_row((uintptr_t)(table + id_at(bags, at + AHEAD) * row_bytes + begin), bytes);
            add(table + id_at(bags, at) * row_bytes, first, width, format, sum);
        }
        if (piece->mean && count > 1) {
            const float inverse = 1.0f / (float)count;
            for (int64_t i = 0; i < width; i++)
                sum[i] *= inverse;
        }
        copy_floats(sum, width, out + 4 * (b * columns + first));
    }
}

#define POOL(FIRST, WIDTH, FORMAT, SUM) \
    pool_step(add_columns, table, piece, FIRST, WIDTH, FORMAT, bags, part, key, SUM, out, columns)

/* All columns. A function of its own, since it compiles to a loop for each format and width. */
WIDE static void pool_any(const uint8_t *table, const Piece *piece, const Bags *bags, const Part *part, int64_t key, uint8_t *out,
                          int64_t columns) {
    BY_ROW(POOL, piece->width, piece->format)
}

#ifdef EIGHT_HALVES
#define POOL_HALVES(FIRST, WIDTH, FORMAT, SUM) \
    pool_step(add_halves, table, piece, FIRST, WIDTH, FORMAT, bags, part, key, SUM, out, columns)

/* The same of FP16 rows, for machines that has_eight_halves. */
EIGHT_HALVES static void pool_halves(const uint8_t *table, const Piece *piece, const Bags *bags, const Part *part, int64_t key,
                                     uint8_t *out, int64_t columns) {
    BY_COLUMNS(POOL_HALVES, piece->width, FP16_ROWS)
}
#endif

static void pool_piece(const uint8_t *table, const Piece *piece, const Bags *bags, const Part *part, int64_t key, uint8_t *out,
                       int64_t columns) {
#ifdef EIGHT_HALVES
    if (piece->format == FP16_ROWS && has_eight_halves()) {
        pool_halves(table, piece, bags, part, key, out, columns);
        return;
    }
#endif
    pool_any(table, piece, bags, part, key, out, columns);
}

/* Whether all ids from `at` to `last` are rows of it; asks for the first rows, which come before any is read. */
INLINE static int are_rows(const uint8_t *table, const Piece *piece, const Bags *bags, int64_t at, int64_t last) {
    for (int64_t i = at; i < last; i++) {
        const int64_t id = id_at(bags, i);
        if (id < 0 || id >= piece->rows)
            return 0;
        if (i < at + AHEAD)
            prefetch_row((uintptr_t)(table + id * piece->row_bytes), piece->row_bytes);
    }
    return 1;
}

/* Find a part's ids; call find_starts first. */
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

/* Whether every id is a row of its table. `out`: float32 [samples, columns], wherever it lies. */
static int pool(const uint8_t *buffer, const Piece *pieces, const Step *steps, int64_t num_steps, const Bags *bags,
                const Part *part, uint8_t *out, int64_t columns) {
    for (int64_t s = 0; s < num_steps; s++) {
        const Piece *piece = pieces + steps[s].piece;
        const uint8_t *table = buffer + piece->offset;
        uint8_t *into = out + 4 * steps[s].column;
        const int64_t key = steps[s].key, at = part->starts[key], last = part->ends[key];
        if (!are_rows(table, piece, bags, at, last))
            return 0;
        pool_piece(table, piece, bags, part, key, into, columns);
    }
    return 1;
}

/* How the rows of one key's bags are sent, where no bag holds more than one id: all as they lie in the table, or those of
   bags that hold one, behind a bit for each bag. */
static uint8_t kind_of(const Bags *bags, const int64_t *starts, int64_t key, const Piece *piece) {
    const int64_t ids = starts[key + 1] - starts[key], size = row_size(piece->width, piece->format);
    if (!ids)
        return EMPTY;
    for (int64_t b = 0; b < bags->batch; b++)
        if (length_at(bags, key * bags->batch + b) > 1)
            return SUMS;
    if (size > 4 * piece->width)
        return SUMS;
    return (bags->batch - ids) * size > bits_bytes(bags->batch) ? SOME : STORED;
}

static int64_t kind_bytes(uint8_t kind, const Piece *piece, int64_t batch, int64_t ids) {
    const int64_t size = row_size(piece->width, piece->format);
    switch (kind) {
    case EMPTY:
        return 0;
    case STORED:
        return batch * size;
    case SOME:
        return bits_bytes(batch) + ids * size;
    default:
        return 4 * batch * piece->width;
    }
}

/* A bag without an id has a row of zero bytes, which stand for zeros, where all have one. */
INLINE static void copy_rows(uint8_t kind, const uint8_t *table, const Piece *piece, int64_t size, const Bags *bags,
                             int64_t key, int64_t at, int64_t last, uint8_t *out) {
    if (kind == SOME) {
        memset(out, 0, (size_t)bits_bytes(bags->batch));
        for (int64_t b = 0; b < bags->batch; b++)
            out[b / 8] |= (uint8_t)(length_at(bags, key * bags->batch + b) << b % 8);
        out += bits_bytes(bags->batch);
    }
    const int all = kind == SOME || last - at == bags->batch; /* every sent row belongs to an id */
    for (int64_t b = 0; all ? at < last : b < bags->batch; b++, out += size) {
        if (!all && !length_at(bags, key * bags->batch + b)) {
            memset(out, 0, (size_t)size);
            continue;
        }
        if (at + AHEAD < last)
            __builtin_prefetch(table + id_at(bags, at + AHEAD) * piece->row_bytes);
        memcpy(out, table + id_at(bags, at) * piece->row_bytes, (size_t)size);
        at++;
    }
}

#define COPY(SIZE) copy_rows(kinds[s], table, piece, SIZE, bags, key, at, last, into)

/* Whether every id is a row of its table. `out`: of each step, its kind; behind these, of each what its kind says. */
WIDE static int pack(const uint8_t *buffer, const Piece *pieces, const Step *steps, int64_t num_steps, const Bags *bags,
                     const Part *part, uint8_t *out) {
    const uint8_t *kinds = out;
    uint8_t *into = out + num_steps;
    for (int64_t s = 0; s < num_steps; s++) {
        const Piece *piece = pieces + steps[s].piece;
        const uint8_t *table = buffer + piece->offset;
        const int64_t key = steps[s].key, at = part->starts[key], last = part->ends[key], columns = piece->width;
        if (!are_rows(table, piece, bags, at, last))
            return 0;
        if (kinds[s] == SUMS) {
            pool_piece(table, piece, bags, part, key, into, columns);
        } else if (kinds[s] != EMPTY) {
            switch (row_size(piece->width, piece->format)) { /* copies of a constant size compile to moves */
            case 12:
                COPY(12);
                break;
            case 20:
                COPY(20);
                break;
            case 36:
                COPY(36);
                break;
            case 68:
                COPY(68);
                break;
            default:
                COPY(row_size(piece->width, piece->format));
            }
        }
        into += kind_bytes(kinds[s], piece, bags->batch, last - at);
    }
    return 1;
}

static int check_pieces(const Piece *pieces, int64_t count, int64_t buffer_bytes) {
    for (int64_t p = 0; p < count; p++) {
        const Piece *piece = pieces + p;
        if (!is_row_format(piece->format) || piece->width < 1 || piece->width > 1 << 24 || piece->rows < 0 || piece->offset < 0 ||
            piece->offset > buffer_bytes || piece->row_bytes < row_size(piece->width, piece->format) ||
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

/* Read a context's arguments, as `pool` has them; raises. The caller releases `steps` if it has an obj. */
static int read_context(PyObject *given, const Py_buffer *data, const Piece *pieces, int64_t num_pieces, Py_ssize_t columns,
                        Context *context, int64_t *widest) {
    PyObject *steps, *places;
    int64_t mine;
    if (!PyArg_ParseTuple(given, "OO!", &steps, &PyTuple_Type, &places) ||
        !read_bags(places, data->buf, data->len, 4, &context->bags) ||
        PyObject_GetBuffer(steps, &context->steps, PyBUF_SIMPLE) < 0)
        return 0;
    const int64_t num_steps = context->steps.len / (Py_ssize_t)sizeof(Step);
    if (context->bags.batch != 1 ||
        !check_steps(context->steps.buf, num_steps, pieces, num_pieces, context->bags.keys, columns, &mine)) {
        PyErr_SetString(PyExc_ValueError, "pool: the context has more than one sample, or is outside the answer");
        return 0;
    }
    *widest = mine > *widest ? mine : *widest;
    return 1;
}

/* Fill a context's columns of all samples; whether every id is a row of its table. `starts`: [keys + 1]. */
static int pool_context(const uint8_t *buffer, const Piece *pieces, const Context *context, int64_t *starts, uint8_t *out,
                        int64_t samples, int64_t columns) {
    const Step *steps = context->steps.buf;
    const int64_t num_steps = context->steps.len / (Py_ssize_t)sizeof *steps;
    const Part part = {0, 1, starts, starts + 1};
    if (!find_starts(&context->bags, starts) ||
        (samples && !pool(buffer, pieces, steps, num_steps, &context->bags, &part, out, columns)))
        return 0;
    for (int64_t b = 1; b < samples; b++)
        for (int64_t s = 0; s < num_steps; s++)
            memcpy(out + 4 * (b * columns + steps[s].column), out + 4 * steps[s].column, 4 * pieces[steps[s].piece].width);
    return 1;
}

PyDoc_STRVAR(pool_doc,
             "pool(buffer, pieces, steps, data, bags, columns, into, length_bytes=4, first=0, samples=-1, context=None)\n"
             "--\n\n"
             "Pooled rows of the `bags` (recinfer.quant.bags.BagPlaces) in the bytes `data`. `length_bytes` 1: lengths are uint8;\n"
             "0: each bag holds one id.\n\n"
             "pieces: int64 [P, 6], offset, rows, bytes of a row, width, row format and mean of tables in `buffer`.\n"
             "steps: int64 [S, 3], place among the keys, piece, first column of the answer's `columns`.\n"
             "into: a writable float32 buffer of [samples, columns], or bytes that the answer begins with.\n"
             "first, samples: which of the batch are wanted, all of them unless both are given. Of the others no id is looked\n"
             "at, and other Python threads run meanwhile.\n"
             "context: of features that go with every sample: (steps, their bags of one sample).\n\n"
             "Returns the answer as bytes, or True when it was written `into`; None when an id is no row of its table or\n"
             "the lengths are not those of so many ids. Columns that no step fills are left as they are, 0 in bytes.\n"
             "Raises ValueError for places outside `data` or `buffer`.");

/* The arguments of `pool` and `pack`, as views. */
typedef struct {
    Py_buffer buffer, pieces_view, steps_view, data;
    PyObject *into;
    const Piece *pieces;
    const Step *steps;
    int64_t num_steps, *starts, *beside_starts;
    Py_ssize_t columns;
    Bags bags;
    Part part;
    Context context;
    int is_part, has_context, is_long;
} Call;

static void close_call(Call *call) {
    Py_buffer *views[] = {&call->buffer, &call->pieces_view, &call->steps_view, &call->data, &call->context.steps};
    for (int i = 0; i < 5; i++)
        if (views[i]->obj != NULL)
            PyBuffer_Release(views[i]);
    PyMem_Free(call->starts);
}

/* 0 with an error; `close_call` it in any case. */
static int open_call(PyObject *args, Call *call) {
    PyObject *buffer, *pieces, *steps, *data, *beside = Py_None;
    PyObject *places;
    Py_ssize_t columns, first = 0, samples = -1;
    int64_t widest;
    int length_bytes = 4;
    memset(call, 0, sizeof *call);
    if (!PyArg_ParseTuple(args, "OOOOO!nO|innO", &buffer, &pieces, &steps, &data, &PyTuple_Type, &places, &columns, &call->into,
                          &length_bytes, &first, &samples, &beside) ||
        PyObject_GetBuffer(buffer, &call->buffer, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(pieces, &call->pieces_view, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(steps, &call->steps_view, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(data, &call->data, PyBUF_SIMPLE) < 0 ||
        !read_bags(places, call->data.buf, call->data.len, length_bytes, &call->bags))
        return 0;
    const Py_ssize_t keys = call->bags.keys, batch = call->bags.batch, ids = call->bags.ids;
    call->pieces = call->pieces_view.buf;
    call->steps = call->steps_view.buf;
    call->columns = columns;
    call->is_part = samples != -1;
    call->has_context = beside != Py_None;
    samples = call->is_part ? samples : batch;
    call->num_steps = call->steps_view.len / (Py_ssize_t)sizeof *call->steps;
    const int64_t num_pieces = call->pieces_view.len / (Py_ssize_t)sizeof *call->pieces;
    if (columns < 0 || (columns && batch > PY_SSIZE_T_MAX / 64 / columns) || first < 0 || first > batch || samples < 0 ||
        samples > batch - first || !check_pieces(call->pieces, num_pieces, call->buffer.len) ||
        !check_steps(call->steps, call->num_steps, call->pieces, num_pieces, keys, columns, &widest)) {
        PyErr_SetString(PyExc_ValueError, "pool: places outside the buffer or the answer");
        return 0;
    }
    if (call->has_context &&
        !read_context(beside, &call->data, call->pieces, num_pieces, columns, &call->context, &widest))
        return 0;
    const Py_ssize_t spans = 2 * keys + 1 + call->context.bags.keys + 1;
    call->starts = PyMem_Malloc((size_t)spans * sizeof *call->starts);
    if (call->starts == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    call->beside_starts = call->starts + 2 * keys + 1;
    call->part = (Part){first, samples, call->starts, call->starts + (call->is_part ? keys + 1 : 1)};
    call->is_long = call->is_part || ids * widest > LONG_WORK;
    return 1;
}

static int pool_call(Call *call, uint8_t *target) {
    const uint8_t *buffer = call->buffer.buf;
    if (!find_starts(&call->bags, call->starts))
        return 0;
    if (call->is_part)
        narrow(&call->bags, &call->part);
    return pool(buffer, call->pieces, call->steps, call->num_steps, &call->bags, &call->part, target, call->columns) &&
           (!call->has_context || pool_context(buffer, call->pieces, &call->context, call->beside_starts, target,
                                               call->part.samples, call->columns));
}

static PyObject *pool_method(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *result = NULL, *answer = NULL;
    Py_buffer out = {0};
    Call call;
    if (!open_call(args, &call))
        goto close;
    const Py_ssize_t floats = call.part.samples * call.columns;
    uint8_t *target;
    if (PyBytes_Check(call.into)) {
        const Py_ssize_t head = PyBytes_Size(call.into);
        answer = PyBytes_FromStringAndSize(NULL, head + 4 * floats);
        if (answer == NULL)
            goto close;
        target = (uint8_t *)PyBytes_AsString(answer);
        memcpy(target, PyBytes_AsString(call.into), (size_t)head);
        target += head;
        memset(target, 0, 4 * (size_t)floats);
    } else {
        if (PyObject_GetBuffer(call.into, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
            goto close;
        if (out.len != 4 * floats) {
            PyErr_SetString(PyExc_ValueError, "pool: the answer is not of [samples, columns] float32");
            goto close;
        }
        target = out.buf;
    }
    int whole;
    if (call.is_long) {
        Py_BEGIN_ALLOW_THREADS
        whole = pool_call(&call, target);
        Py_END_ALLOW_THREADS
    } else {
        whole = pool_call(&call, target);
    }
    result = !whole ? Py_None : answer != NULL ? answer : Py_True;
    Py_INCREF(result);
close:
    if (out.obj != NULL)
        PyBuffer_Release(&out);
    close_call(&call);
    Py_XDECREF(answer);
    return result;
}

PyDoc_STRVAR(pack_doc,
             "pack(buffer, pieces, steps, data, bags, columns, into, length_bytes=4)\n"
             "--\n\n"
             "What `pool` computes, in fewer bytes: rows of bags that hold at most one id are copied as they are stored.\n\n"
             "Returns the bytes `into`, a varint of the size of what follows, a byte for each step, then of each step what that\n"
             "says. 0: nothing, its bags are empty. 1: [batch] rows without what aligns them, zero bytes for a bag without an\n"
             "id. 2: float32 [batch, width]. 3: a bit for each bag, the lowest first, and the rows of those that hold an id.\n"
             "None and errors are those of `pool`; `columns` only limits the steps' columns.");

static PyObject *pack_method(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *result = NULL;
    Call call;
    if (!open_call(args, &call))
        goto close;
    if (call.is_part || call.has_context) {
        PyErr_SetString(PyExc_ValueError, "pack: expected a whole batch, and no context");
        goto close;
    }
    if (!PyBytes_Check(call.into)) {
        PyErr_SetString(PyExc_TypeError, "pack: expected bytes that the answer begins with");
        goto close;
    }
    if (!find_starts(&call.bags, call.starts)) {
        result = Py_None;
        Py_INCREF(result);
        goto close;
    }
    int64_t size = call.num_steps;
    for (int64_t s = 0; s < call.num_steps; s++) {
        const Piece *piece = call.pieces + call.steps[s].piece;
        const int64_t key = call.steps[s].key, ids = call.starts[key + 1] - call.starts[key];
        size += kind_bytes(kind_of(&call.bags, call.starts, key, piece), piece, call.bags.batch, ids);
        if (size > PY_SSIZE_T_MAX / 2) {
            PyErr_NoMemory();
            goto close;
        }
    }
    uint8_t varint[10];
    Py_ssize_t width = 0;
    for (uint64_t left = (uint64_t)size;; left >>= 7) {
        varint[width++] = (uint8_t)(left > 0x7f ? left | 0x80 : left);
        if (left <= 0x7f)
            break;
    }
    const Py_ssize_t head = PyBytes_Size(call.into);
    result = PyBytes_FromStringAndSize(NULL, head + width + size);
    if (result == NULL)
        goto close;
    uint8_t *out = (uint8_t *)PyBytes_AsString(result);
    memcpy(out, PyBytes_AsString(call.into), (size_t)head);
    memcpy(out + head, varint, (size_t)width);
    out += head + width;
    for (int64_t s = 0; s < call.num_steps; s++)
        out[s] = kind_of(&call.bags, call.starts, call.steps[s].key, call.pieces + call.steps[s].piece);
    int whole;
    if (call.is_long) {
        Py_BEGIN_ALLOW_THREADS
        whole = pack(call.buffer.buf, call.pieces, call.steps, call.num_steps, &call.bags, &call.part, out);
        Py_END_ALLOW_THREADS
    } else {
        whole = pack(call.buffer.buf, call.pieces, call.steps, call.num_steps, &call.bags, &call.part, out);
    }
    if (!whole) {
        Py_DECREF(result);
        result = Py_None;
        Py_INCREF(result);
    }
close:
    close_call(&call);
    return result;
}

/* Bags by the place of their first ids. */
typedef struct {
    Py_buffer ids, offsets, weights; /* `offsets` without an obj: each bag holds one id; `weights` without one: each is 1 */
    int64_t batch;
} OffsetBags;

static inline int64_t number_at(const Py_buffer *numbers, int64_t at) {
    return numbers->itemsize == 8 ? ((const int64_t *)numbers->buf)[at] : ((const int32_t *)numbers->buf)[at];
}

static inline int64_t offset_at(const OffsetBags *bags, int64_t bag) {
    return bags->offsets.obj == NULL ? bag : number_at(&bags->offsets, bag);
}

/* `width` columns from `first` on of all bags of one feature in one piece; whether their ids are rows of it, or -1, which
   stands for no row. */
INLINE static int sum_step(const uint8_t *table, const Piece *piece, int64_t first, int64_t width, int64_t format,
                           const OffsetBags *bags, int64_t key, float *restrict sum, uint8_t *out, int64_t columns) {
    const int64_t bag = key * bags->batch, ids = bags->ids.len / bags->ids.itemsize;
    const int64_t last = offset_at(bags, bag + bags->batch);
    const int64_t begin = first ? byte_of(first, format) : 0, bytes = byte_of(first + width, format) - begin;
    const float *weights = bags->weights.obj == NULL ? NULL : bags->weights.buf;
    float vector[WIDEST];
    for (int64_t b = 0; b < bags->batch; b++) {
        const int64_t start = offset_at(bags, bag + b), end = offset_at(bags, bag + b + 1);
        if (start < 0 || end < start || end > ids)
            return 0;
        for (int64_t i = 0; i < width; i++)
            sum[i] = 0.0f;
        for (int64_t at = start; at < end; at++) {
            const int64_t id = number_at(&bags->ids, at);
            if (at + AHEAD < last && at + AHEAD < ids)
                prefetch_row((uintptr_t)table + (uintptr_t)number_at(&bags->ids, at + AHEAD) * (uintptr_t)piece->row_bytes +
                                 (uintptr_t)begin,
                             bytes);
            if (id == -1)
                continue;
            if (id < 0 || id >= piece->rows)
                return 0;
            const uint8_t *row = table + id * piece->row_bytes;
            if (weights == NULL) {
                add_columns(row, first, width, format, sum);
                continue;
            }
            for (int64_t i = 0; i < width; i++)
                vector[i] = 0.0f;
            add_columns(row, first, width, format, vector);
            for (int64_t i = 0; i < width; i++)
                sum[i] = fmaf(weights[at], vector[i], sum[i]);
        }
        if (piece->mean && end - start > 1) {
            const float inverse = 1.0f / (float)(end - start);
            for (int64_t i = 0; i < width; i++)
                sum[i] *= inverse;
        }
        copy_floats(sum, width, out + 4 * (b * columns + first));
    }
    return 1;
}

#define SUM(FIRST, WIDTH, FORMAT, VECTOR) \
    whole &= sum_step(buffer + piece->offset, piece, FIRST, WIDTH, FORMAT, bags, steps[s].key, VECTOR, into, columns)

/* Whether every id is a row of its table. */
WIDE static int sum_bags(const uint8_t *buffer, const Piece *pieces, const Step *steps, int64_t num_steps,
                         const OffsetBags *bags, uint8_t *out, int64_t columns) {
    int whole = 1;
    for (int64_t s = 0; whole && s < num_steps; s++) {
        const Piece *piece = pieces + steps[s].piece;
        uint8_t *into = out + 4 * steps[s].column;
        if (piece->format == BF16_ROWS) { /* others are here only beside these: one loop less to compile for each */
            BY_COLUMNS(SUM, piece->width, BF16_ROWS)
        } else {
            BY_COLUMNS(SUM, piece->width, piece->format)
        }
    }
    return whole;
}

PyDoc_STRVAR(sum_doc,
             "sum_bags(buffer, pieces, steps, ids, offsets, weights, batch, columns, into)\n"
             "--\n\n"
             "Pooled rows of bags in tensors' memory, for rows that FBGEMM lacks: into float32 [batch, columns].\n\n"
             "pieces, steps: as `pool` takes them. ids, offsets: int32 or int64; None for offsets: each of `batch` ids is a bag\n"
             "of the only key. weights: float32, one for each id, or None.\n\n"
             "Returns whether every id is a row of its table or -1, which stands for no row, and the offsets are in order.\n"
             "Raises ValueError for arrays of another size, and for places outside the buffer or the answer.");

static int read_numbers(PyObject *object, Py_buffer *view, int nullable) {
    if (nullable && object == Py_None)
        return 1;
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS) < 0)
        return 0;
    if (view->itemsize == 4 || view->itemsize == 8)
        return 1;
    PyErr_SetString(PyExc_ValueError, "sum_bags: expected numbers of 4 or 8 bytes");
    return 0;
}

static PyObject *sum_method(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *buffer_object, *pieces_object, *steps_object, *ids, *offsets, *weights, *into, *result = NULL;
    Py_ssize_t batch, columns;
    Py_buffer buffer = {0}, pieces_view = {0}, steps_view = {0}, out = {0};
    OffsetBags bags = {0};
    if (!PyArg_ParseTuple(args, "OOOOOOnnO", &buffer_object, &pieces_object, &steps_object, &ids, &offsets, &weights, &batch,
                          &columns, &into) ||
        PyObject_GetBuffer(buffer_object, &buffer, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(pieces_object, &pieces_view, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(steps_object, &steps_view, PyBUF_SIMPLE) < 0 || !read_numbers(ids, &bags.ids, 0) ||
        !read_numbers(offsets, &bags.offsets, 1) || !read_numbers(weights, &bags.weights, 1) ||
        PyObject_GetBuffer(into, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        goto close;
    const int64_t num_ids = bags.ids.len / bags.ids.itemsize;
    const int64_t num_pieces = pieces_view.len / (Py_ssize_t)sizeof(Piece), num_steps = steps_view.len / (Py_ssize_t)sizeof(Step);
    int64_t keys = 1, widest;
    bags.batch = batch;
    if (bags.offsets.obj != NULL)
        keys = batch > 0 ? (bags.offsets.len / bags.offsets.itemsize - 1) / batch : INT64_MAX;
    if (batch < 0 || columns < 0 || (columns && batch > PY_SSIZE_T_MAX / 64 / columns) || out.len != 4 * batch * columns ||
        (bags.offsets.obj == NULL ? batch != num_ids : !bags.offsets.len) ||
        (bags.weights.obj != NULL && (bags.weights.itemsize != 4 || bags.weights.len != 4 * num_ids)) ||
        !check_pieces(pieces_view.buf, num_pieces, buffer.len) ||
        !check_steps(steps_view.buf, num_steps, pieces_view.buf, num_pieces, keys, columns, &widest)) {
        PyErr_SetString(PyExc_ValueError, "sum_bags: arrays of another size, or places outside the buffer or the answer");
        goto close;
    }
    int whole;
    if (num_ids * widest > LONG_WORK) {
        Py_BEGIN_ALLOW_THREADS
        whole = sum_bags(buffer.buf, pieces_view.buf, steps_view.buf, num_steps, &bags, out.buf, columns);
        Py_END_ALLOW_THREADS
    } else {
        whole = sum_bags(buffer.buf, pieces_view.buf, steps_view.buf, num_steps, &bags, out.buf, columns);
    }
    result = PyBool_FromLong(whole);
close:
    Py_buffer *views[] = {&buffer, &pieces_view, &steps_view, &bags.ids, &bags.offsets, &bags.weights, &out};
    for (int i = 0; i < 7; i++)
        if (views[i]->obj != NULL)
            PyBuffer_Release(views[i]);
    return result;
}

static PyMethodDef methods[] = {{"pack", pack_method, METH_VARARGS, pack_doc},
                                {"sum_bags", sum_method, METH_VARARGS, sum_doc},
                                {"pool", pool_method, METH_VARARGS, pool_doc},
                                {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_tables", "Pooled lookups in packed tables, from bytes.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tables(void) { return PyModuleDef_Init(&definition); }
