/* Small plain requests between a ranker and its shard servers, from bytes to bytes: a request split by rank, a shard server's
   request read, and the answers joined. Other requests give None: the path through arrays answers them, or reports their errors.

   The structs PlainPart, PlainFind, RankStreams and RankAnswer are those of recinfer.serving.shards.rank_structs, with their
   fields in the same order. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "../../quant/_bags.h"
#include "../../quant/_half.h"
#include "../../quant/_row.h"
#include "../wire/_reader.h"

/* -- reading a ShardRequest ------------------------------------------------------------------------------------------ */

typedef struct {
    uint64_t rank, module, length_bytes;
    Span lengths, ids;
    int wide;
} PlainPart;

typedef struct {
    Span version;
    uint64_t batch, stored;
    PyObject *parts; /* a list */
} PlainFind;

static int read_part(Span message, PlainPart *part) {
    Reader reader = {message.at, message.at + message.size};
    unsigned seen = 0;
    while (reader.at < reader.end) {
        uint64_t tag;
        if (!read_tag(&reader, &tag))
            return 0;
        const uint64_t field = tag >> 3;
        if (field < 1 || field > 6 || seen & 1u << field)
            return 0;
        seen |= 1u << field;
        const int delimited = field == 3 || field >= 5;
        if ((tag & 7) != (delimited ? DELIMITED : VARINT))
            return 0;
        int read;
        if (field == 3)
            read = read_span(&reader, &part->lengths);
        else if (delimited)
            read = read_span(&reader, &part->ids);
        else
            read = read_varint(&reader, field == 1 ? &part->rank : field == 2 ? &part->module : &part->length_bytes);
        if (!read)
            return 0;
    }
    part->wide = (seen >> 6) & 1;
    return (seen >> 5 & 3) != 3 && part->rank <= INT32_MAX && part->module <= INT32_MAX &&
           (part->length_bytes == 4 || part->length_bytes == 1 || (part->length_bytes == 0 && !part->lengths.size)) &&
           part->ids.size && part->ids.size % (part->wide ? 8 : 4) == 0;
}

/* The fields of a PlainPart; places are offsets from `bytes`. */
static PyObject *fields_of_part(const PlainPart *part, const uint8_t *bytes) {
    return Py_BuildValue("nnnnnnnO", (Py_ssize_t)part->rank, (Py_ssize_t)part->module, (Py_ssize_t)part->length_bytes,
                         part->lengths.at == NULL ? (Py_ssize_t)0 : (Py_ssize_t)(part->lengths.at - bytes),
                         part->lengths.size, (Py_ssize_t)(part->ids.at - bytes), part->ids.size / (part->wide ? 8 : 4),
                         part->wide ? Py_True : Py_False);
}

/* Read a plain request: 1 if the bytes are a plain request, 0 for any other request, -1 with a Python error. */
static int read_plain_find(const uint8_t *bytes, Py_ssize_t size, PlainFind *found) {
    Reader reader = {bytes, bytes + size};
    while (reader.at < reader.end) {
        uint64_t tag;
        Span span;
        if (!read_tag(&reader, &tag))
            return 0;
        if (tag == (2 << 3 | VARINT)) {
            if (found->batch || !read_varint(&reader, &found->batch) || found->batch < 1 || found->batch > INT32_MAX)
                return 0;
        } else if (tag == (5 << 3 | VARINT)) {
            if (!read_varint(&reader, &found->stored) || found->stored > 1)
                return 0;
        } else if (tag == (1 << 3 | DELIMITED)) {
            if (found->version.at != NULL || !read_span(&reader, &found->version))
                return 0;
        } else if (tag == (6 << 3 | DELIMITED)) { /* the trace, which the answer does not depend on */
            if (!read_span(&reader, &span))
                return 0;
        } else if (tag == (3 << 3 | DELIMITED)) {
            PlainPart part = {0};
            if (!read_span(&reader, &span) || !read_part(span, &part))
                return 0;
            PyObject *fields = fields_of_part(&part, bytes);
            const int failed = fields == NULL || PyList_Append(found->parts, fields) < 0;
            Py_XDECREF(fields);
            if (failed)
                return -1;
        } else {
            return 0;
        }
    }
    return found->batch && found->version.at != NULL;
}

PyDoc_STRVAR(read_doc,
             "read_find(data)\n--\n\n"
             "The fields of a recinfer.serving.shards.rank_structs.PlainFind for a serialized ShardRequest; None for a request\n"
             "that is not plain. Each of its parts: the fields of a PlainPart. Lengths and ids are not checked.");

static PyObject *read_method(PyObject *module, PyObject *data) {
    (void)module;
    if (!PyBytes_Check(data)) {
        PyErr_SetString(PyExc_TypeError, "read_find: expected bytes");
        return NULL;
    }
    PlainFind found = {{NULL, 0}, 0, 0, PyList_New(0)};
    if (found.parts == NULL)
        return NULL;
    PyObject *fields = NULL;
    const int is_plain = read_plain_find((const uint8_t *)PyBytes_AsString(data), PyBytes_Size(data), &found);
    if (is_plain > 0)
        fields = Py_BuildValue("s#nOO", (const char *)found.version.at, found.version.size, (Py_ssize_t)found.batch,
                               found.stored ? Py_True : Py_False, found.parts);
    Py_DECREF(found.parts);
    if (is_plain == 0 || (fields == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return fields;
}

/* -- splitting a request by rank ------------------------------------------------------------------------------------- */

/* One feature's ids in a range of rows; `key`: its place in the request, -1 where it is absent. */
typedef struct {
    int64_t key, start, rows;
} Stream;

/* The ids for one rank: their number, the most of one bag, and whether each bag has one id. */
typedef struct {
    int64_t ids, most;
    int ones;
} Counts;

static inline int is_kept(const Stream *stream, int64_t id) {
    return (uint64_t)(id - stream->start) < (uint64_t)stream->rows;
}

/* Whether a stream's range holds every id that its key may have. */
static inline int is_whole(const Stream *stream, const int64_t *limits) {
    return stream->start == 0 && stream->rows >= limits[stream->key];
}

/* Count the ids of a rank. `ones`: each bag holds one id, here and below. */
static Counts count_kept(const Bags *bags, const int64_t *starts, const int64_t *limits, const Stream *streams,
                         int64_t num_streams, int ones) {
    Counts counts = {0, 0, 1};
    for (int64_t s = 0; s < num_streams; s++) {
        const Stream *stream = streams + s;
        if (stream->key < 0) {
            counts.ones = 0;
            continue;
        }
        const int whole = is_whole(stream, limits);
        int64_t at = starts[stream->key];
        if (ones) {
            int64_t kept = whole ? bags->batch : 0;
            if (!whole)
                for (int64_t b = 0; b < bags->batch; b++)
                    kept += is_kept(stream, id_at(bags, at + b));
            counts.ids += kept;
            counts.most = kept && !counts.most ? 1 : counts.most;
            counts.ones &= kept == bags->batch;
            continue;
        }
        for (int64_t b = 0; b < bags->batch; b++) {
            const int64_t length = length_at(bags, stream->key * bags->batch + b), end = at + length;
            int64_t kept = length;
            if (whole) {
                at = end;
            } else {
                for (kept = 0; at < end; at++)
                    kept += is_kept(stream, id_at(bags, at));
            }
            counts.ids += kept;
            counts.most = kept > counts.most ? kept : counts.most;
            counts.ones &= kept == 1;
        }
    }
    return counts;
}

/* Write each id and advance only if it is kept: no branch, since its outcome would be unpredictable. */
static void put_kept(const Bags *bags, const int64_t *starts, const int64_t *limits, const Stream *streams,
                     int64_t num_streams, int wide, uint8_t *into, int64_t ids) {
    const int size = wide ? 8 : 4;
    const uint8_t *end = into + size * ids;
    for (int64_t s = 0; s < num_streams; s++) {
        const Stream *stream = streams + s;
        if (stream->key < 0)
            continue;
        if (!wide && is_whole(stream, limits)) {
            const int64_t first = starts[stream->key], count = starts[stream->key + 1] - first;
            for (int64_t i = 0; i < count; i++) {
                const int32_t narrow = (int32_t)id_at(bags, first + i);
                memcpy(into + 4 * i, &narrow, 4);
            }
            into += 4 * count;
            continue;
        }
        for (int64_t at = starts[stream->key]; at < starts[stream->key + 1]; at++) {
            if (into == end)
                return;
            const int64_t id = id_at(bags, at), local = id - stream->start;
            const int32_t narrow = (int32_t)local;
            memcpy(into, wide ? (const void *)&local : (const void *)&narrow, wide ? 8 : 4);
            into += is_kept(stream, id) ? size : 0;
        }
    }
}

static uint8_t *put_lengths(const Bags *bags, const int64_t *starts, const Stream *streams, int64_t num_streams,
                            int length_bytes, int ones, uint8_t *into) {
    for (int64_t s = 0; s < num_streams; s++) {
        const Stream *stream = streams + s;
        int64_t at = stream->key < 0 ? 0 : starts[stream->key];
        if (ones && stream->key >= 0) { /* lengths of 0 or 1 take a byte each */
            for (int64_t b = 0; b < bags->batch; b++)
                into[b] = (uint8_t)is_kept(stream, id_at(bags, at + b));
            into += bags->batch;
            continue;
        }
        for (int64_t b = 0; b < bags->batch; b++) {
            uint32_t kept = 0;
            if (stream->key >= 0)
                for (const int64_t end = at + length_at(bags, stream->key * bags->batch + b); at < end; at++)
                    kept += (uint32_t)is_kept(stream, id_at(bags, at));
            if (length_bytes == 1)
                *into = (uint8_t)kept;
            else
                memcpy(into, &kept, 4);
            into += length_bytes;
        }
    }
    return into;
}

static Py_ssize_t varint_size(uint64_t value) {
    Py_ssize_t size = 1;
    for (; value > 0x7f; value >>= 7)
        size++;
    return size;
}

static uint8_t *put_head(uint8_t *into, int field, uint64_t size) {
    *into++ = (uint8_t)(field << 3 | DELIMITED);
    for (; size > 0x7f; size >>= 7)
        *into++ = (uint8_t)(size | 0x80);
    *into++ = (uint8_t)size;
    return into;
}

static Py_ssize_t field_size(Py_ssize_t size) { return 1 + varint_size((uint64_t)size) + size; }

typedef struct {
    PyObject *head_without_lengths, *head_of_byte_lengths, *head_of_int_lengths; /* bytes, borrowed */
    Py_buffer streams;
    int wide;
} RankStreams;

/* Read the fields of a rank: 0 with a Python error; else the caller has to release its buffer. */
static int read_rank_streams(PyObject *fields, RankStreams *rank) {
    PyObject *streams;
    return PyArg_ParseTuple(fields, "SSSOp", &rank->head_without_lengths, &rank->head_of_byte_lengths,
                            &rank->head_of_int_lengths, &streams, &rank->wide) &&
           PyObject_GetBuffer(streams, &rank->streams, PyBUF_SIMPLE) == 0;
}

/* One rank's part as a field of a ShardRequest; None without any id; NULL with a Python error. */
static PyObject *part_of(PyObject *fields, const Bags *bags, const int64_t *starts, const int64_t *limits, int ones) {
    RankStreams rank;
    PyObject *result = NULL;
    if (!read_rank_streams(fields, &rank))
        return NULL;
    const Stream *streams = rank.streams.buf;
    const int64_t num_streams = rank.streams.len / (Py_ssize_t)sizeof *streams;
    const int wide = rank.wide;
    for (int64_t s = 0; s < num_streams; s++) {
        if (streams[s].key < -1 || streams[s].key >= bags->keys || streams[s].start < 0 || streams[s].rows < 0 ||
            (!wide && streams[s].rows > (int64_t)INT32_MAX + 1)) {
            PyErr_SetString(PyExc_ValueError, "split: a stream is not of this request");
            goto release;
        }
    }
    const Counts counts = count_kept(bags, starts, limits, streams, num_streams, ones);
    if (!counts.ids) {
        result = Py_None;
        Py_INCREF(result);
        goto release;
    }
    const int length_bytes = counts.ones ? 0 : counts.most < 256 ? 1 : 4;
    PyObject *head = length_bytes == 4   ? rank.head_of_int_lengths
                     : length_bytes == 1 ? rank.head_of_byte_lengths
                                         : rank.head_without_lengths;
    const Py_ssize_t head_size = PyBytes_Size(head), ids_size = (wide ? 8 : 4) * counts.ids,
                     lengths_size = length_bytes * num_streams * bags->batch;
    const Py_ssize_t size = head_size + (length_bytes ? field_size(lengths_size) : 0) + field_size(ids_size);
    result = PyBytes_FromStringAndSize(NULL, field_size(size));
    if (result == NULL)
        goto release;
    uint8_t *into = put_head((uint8_t *)PyBytes_AsString(result), 3, (uint64_t)size);
    memcpy(into, PyBytes_AsString(head), (size_t)head_size);
    into += head_size;
    if (length_bytes)
        into = put_lengths(bags, starts, streams, num_streams, length_bytes, ones, put_head(into, 3, (uint64_t)lengths_size));
    put_kept(bags, starts, limits, streams, num_streams, wide, put_head(into, wide ? 6 : 5, (uint64_t)ids_size), counts.ids);
release:
    PyBuffer_Release(&rank.streams);
    return result;
}

/* Whether each id is 0 or more and below its key's number of rows. */
static int fits(const Bags *bags, const int64_t *starts, const int64_t *limits) {
    int all = 1;
    for (int64_t key = 0; key < bags->keys; key++) {
        int outside = 0; /* no early exit, so that the compiler vectorizes the loop */
        for (int64_t at = starts[key]; at < starts[key + 1]; at++)
            outside |= (uint64_t)id_at(bags, at) >= (uint64_t)limits[key];
        all &= !outside;
    }
    return all;
}

/* Whether each bag holds one id. */
static int are_ones(const Bags *bags) {
    int64_t others = bags->ids != bags->keys * bags->batch;
    for (int64_t at = 0; !others && at < bags->ids; at++)
        others = length_at(bags, at) != 1;
    return !others;
}

PyDoc_STRVAR(split_doc,
             "split(data, bags, limits, ranks)\n--\n\n"
             "Each rank's part of the `bags` (recinfer.quant.bags.BagPlaces) in the bytes `data`: a ShardRequest's field, or None\n"
             "for a rank without ids.\n\n"
             "limits: int64 [keys], rows of each key's tables.\n"
             "ranks: a recinfer.serving.shards.rank_structs.RankStreams of each rank.\n\n"
             "None when an id is not below its limit or the lengths do not add up to the number of ids. Raises ValueError for\n"
             "places outside `data`.");

static PyObject *split_method(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *data, *places, *limits_object, *ranks, *found = NULL;
    Bags bags;
    Py_buffer limits_view;
    int64_t *starts = NULL;
    if (!PyArg_ParseTuple(args, "SO!OO!", &data, &PyTuple_Type, &places, &limits_object, &PyList_Type, &ranks) ||
        !read_bags(places, (const uint8_t *)PyBytes_AsString(data), PyBytes_Size(data), 4, &bags) ||
        PyObject_GetBuffer(limits_object, &limits_view, PyBUF_SIMPLE) < 0)
        return NULL;
    const int64_t *limits = limits_view.buf;
    if (limits_view.len != bags.keys * (Py_ssize_t)sizeof *limits) {
        PyErr_SetString(PyExc_ValueError, "split: expected a limit for each key");
        goto release;
    }
    starts = PyMem_Malloc(((size_t)bags.keys + 1) * sizeof *starts);
    if (starts == NULL) {
        PyErr_NoMemory();
        goto release;
    }
    if (!find_starts(&bags, starts) || !fits(&bags, starts, limits)) {
        found = Py_None;
        Py_INCREF(found);
        goto release;
    }
    const int ones = are_ones(&bags);
    const Py_ssize_t num_ranks = PyList_Size(ranks);
    found = PyList_New(num_ranks);
    for (Py_ssize_t r = 0; found != NULL && r < num_ranks; r++) {
        PyObject *part = part_of(PyList_GetItem(ranks, r), &bags, starts, limits, ones);
        if (part == NULL || PyList_SetItem(found, r, part) < 0)
            Py_CLEAR(found);
    }
release:
    PyMem_Free(starts);
    PyBuffer_Release(&limits_view);
    return found;
}

/* -- joining the answers ---------------------------------------------------------------------------------------------- */

/* Neighbouring columns: first column `at` of the rank, first column `to` of the answer; `adds`: other ranks add to them. */
typedef struct {
    int64_t at, to, width, adds;
} Run;

static void put_run(const uint8_t *values, int64_t rank_columns, const Run *run, uint8_t *out, int64_t columns,
                    int64_t batch) {
    for (int64_t b = 0; b < batch; b++) {
        const uint8_t *from = values + 4 * (b * rank_columns + run->at);
        uint8_t *to = out + 4 * (b * columns + run->to);
        if (!run->adds) {
            memcpy(to, from, 4 * (size_t)run->width);
            continue;
        }
        for (int64_t i = 0; i < run->width; i++) {
            float sum, value;
            memcpy(&sum, to + 4 * i, 4);
            memcpy(&value, from + 4 * i, 4);
            sum += value;
            memcpy(to + 4 * i, &sum, 4);
        }
    }
}

/* One feature's columns as a rank has them: `to` of the answer, -1 if the answer lacks them. */
typedef struct {
    int64_t width, format, to, adds;
} Pair;

/* Bytes of a pair's part of an answer with `left` bytes; more than `left` for an unknown kind. */
static int64_t kind_bytes(uint8_t kind, const Pair *pair, int64_t batch, const uint8_t *part, int64_t left) {
    const int64_t size = row_size(pair->width, pair->format), head = bits_bytes(batch);
    int64_t rows = 0;
    switch (kind) {
    case EMPTY:
        return 0;
    case STORED:
        return batch * size;
    case SUMS:
        return 4 * batch * pair->width;
    case SOME:
        for (int64_t b = 0; head <= left && b < batch; b++)
            rows += part[b / 8] >> b % 8 & 1;
        return head + rows * size;
    default:
        return left + 1;
    }
}

INLINE static void put_vector(const float *vector, int64_t width, int64_t adds, uint8_t *to) {
    if (!adds) {
        copy_floats(vector, width, to);
        return;
    }
    for (int64_t i = 0; i < width; i++) {
        float sum;
        memcpy(&sum, to + 4 * i, 4);
        sum += vector[i];
        memcpy(to + 4 * i, &sum, 4);
    }
}

/* `width` columns from `column` on of rows of `size` bytes. `there`: a bit for each bag that has a row; NULL: all have. Read
   eight bytes at a time: a branch for each bag would be unpredictable. */
INLINE static void put_rows(const uint8_t *there, const uint8_t *row, int64_t size, int64_t column, int64_t width, int64_t format,
                            int64_t adds, float *restrict vector, uint8_t *out, int64_t columns, int64_t batch) {
    for (int64_t first = 0; first < batch; first += 64) {
        const int64_t count = batch - first < 64 ? batch - first : 64;
        const uint64_t all = count < 64 ? ((uint64_t)1 << count) - 1 : UINT64_MAX;
        uint64_t left = all;
        if (there != NULL) {
            left = 0;
            for (int64_t i = 0; i < bits_bytes(count); i++)
                left |= (uint64_t)there[first / 8 + i] << 8 * i;
            left &= all;
        }
        for (; left; left &= left - 1, row += size) {
            for (int64_t i = 0; i < width; i++)
                vector[i] = 0.0f;
            add_columns(row, column, width, format, vector);
            put_vector(vector, width, adds, out + 4 * ((first + __builtin_ctzll(left)) * columns + column));
        }
    }
}

#define PUT(FIRST, WIDTH, FORMAT, VECTOR) \
    put_rows(there, row, row_size(pair->width, FORMAT), FIRST, WIDTH, FORMAT, pair->adds, VECTOR, to, columns, batch)

/* Add a packed answer, whose size `is_pack` has checked, to `out`. */
WIDE static void put_packed(const uint8_t *packed, int64_t size, const Pair *pairs, int64_t num_pairs, uint8_t *out,
                            int64_t columns, int64_t batch) {
    const uint8_t *from = packed + num_pairs, *end = packed + size;
    for (int64_t p = 0; p < num_pairs; p++) {
        const Pair *pair = pairs + p;
        const uint8_t *there = packed[p] == SOME ? from : NULL, *row = there == NULL ? from : from + bits_bytes(batch);
        uint8_t *to = out + 4 * pair->to;
        from += kind_bytes(packed[p], pair, batch, from, end - from);
        if (pair->to < 0 || packed[p] == EMPTY)
            continue;
        BY_ROW(PUT, pair->width, packed[p] == SUMS ? FP32_ROWS : pair->format)
    }
}

static int is_pair(const Pair *pair, int64_t batch) {
    return is_row_format(pair->format) && pair->width >= 1 && pair->width <= 1 << 24 && batch <= PY_SSIZE_T_MAX / 64 / pair->width;
}

/* Whether `packed` has the size of a packed answer of these pairs, each of which `is_pair`. */
static int is_pack(const Py_buffer *packed, const Pair *pairs, int64_t num_pairs, int64_t batch) {
    const uint8_t *kinds = packed->buf;
    int64_t left = packed->len - num_pairs;
    for (int64_t p = 0; p < num_pairs && left >= 0; p++)
        left -= kind_bytes(kinds[p], pairs + p, batch, kinds + (packed->len - left), left);
    return !left;
}

/* Check a packed answer and add it to `out`; 0 with a Python error. */
static int put_pack(const Py_buffer *packed, const Py_buffer *pairs_view, uint8_t *out, int64_t columns, int64_t batch) {
    const Pair *pairs = pairs_view->buf;
    const int64_t num_pairs = pairs_view->len / (Py_ssize_t)sizeof *pairs;
    for (int64_t p = 0; p < num_pairs; p++) {
        const Pair *pair = pairs + p;
        if (!is_pair(pair, batch) || pair->to < -1 || (pair->to >= 0 && pair->to > columns - pair->width)) {
            PyErr_SetString(PyExc_ValueError, "join: columns outside the answer");
            return 0;
        }
    }
    if (!is_pack(packed, pairs, num_pairs, batch)) {
        PyErr_SetString(PyExc_ValueError, "join: a rank's answer is not of the rows that it has");
        return 0;
    }
    put_packed(packed->buf, packed->len, pairs, num_pairs, out, columns, batch);
    return 1;
}

PyDoc_STRVAR(is_packed_doc,
             "is_packed_answer(packed, pairs, batch)\n--\n\n"
             "Whether bytes are a packed answer of `batch` samples; `pairs`: the spans of a packed RankAnswer.");

static PyObject *is_packed_method(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *packed_object, *pairs_object;
    Py_ssize_t batch;
    Py_buffer packed, pairs;
    if (!PyArg_ParseTuple(args, "OOn", &packed_object, &pairs_object, &batch) ||
        PyObject_GetBuffer(packed_object, &packed, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(pairs_object, &pairs, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&packed);
        return NULL;
    }
    const Pair *first = pairs.buf, *end = first + pairs.len / (Py_ssize_t)sizeof *first;
    int found = batch > 0;
    for (const Pair *pair = first; found && pair < end; pair++)
        found = is_pair(pair, batch);
    found = found && is_pack(&packed, first, end - first, batch);
    PyBuffer_Release(&pairs);
    PyBuffer_Release(&packed);
    return PyBool_FromLong(found);
}

typedef struct {
    Py_buffer values;
    Py_ssize_t columns; /* -1: the values are packed */
    Py_buffer spans;    /* Run, or Pair where the values are packed */
} RankAnswer;

/* Read the fields of an answer: 0 with a Python error; else the caller has to release its buffers. */
static int read_rank_answer(PyObject *fields, RankAnswer *answer) {
    PyObject *values, *spans;
    if (!PyArg_ParseTuple(fields, "OnO", &values, &answer->columns, &spans) ||
        PyObject_GetBuffer(values, &answer->values, PyBUF_SIMPLE) < 0)
        return 0;
    if (PyObject_GetBuffer(spans, &answer->spans, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&answer->values);
        return 0;
    }
    return 1;
}

/* Add float32 values to `out`; 0 with a Python error. */
static int put_values(const RankAnswer *answer, uint8_t *out, int64_t columns, int64_t batch) {
    const int64_t mine = answer->columns;
    if (mine < 0 || mine > PY_SSIZE_T_MAX / 64 / batch || answer->values.len != 4 * batch * mine) {
        PyErr_SetString(PyExc_ValueError, "join: a rank's answer is not of [batch, its columns] float32");
        return 0;
    }
    const Run *runs = answer->spans.buf;
    const int64_t num_runs = answer->spans.len / (Py_ssize_t)sizeof *runs;
    for (int64_t r = 0; r < num_runs; r++) {
        const Run *run = runs + r;
        if (run->width < 0 || run->at < 0 || run->to < 0 || run->width > mine || run->width > columns ||
            run->at > mine - run->width || run->to > columns - run->width) {
            PyErr_SetString(PyExc_ValueError, "join: columns outside the answer");
            return 0;
        }
    }
    for (int64_t r = 0; r < num_runs; r++)
        put_run(answer->values.buf, mine, runs + r, out, columns, batch);
    return 1;
}

/* Add one rank's answer to `out`; 0 with a Python error. */
static int put_rank(PyObject *fields, uint8_t *out, int64_t columns, int64_t batch) {
    RankAnswer answer;
    if (!read_rank_answer(fields, &answer))
        return 0;
    const int done = answer.columns == -1 ? put_pack(&answer.values, &answer.spans, out, columns, batch)
                                          : put_values(&answer, out, columns, batch);
    PyBuffer_Release(&answer.spans);
    PyBuffer_Release(&answer.values);
    return done;
}

/* Divide sums of bags by the numbers of their ids. `means`: [M, 3], place among the keys, first and last column. */
static int divide(const int64_t *means, int64_t num_means, const Bags *bags, uint8_t *out, int64_t columns) {
    for (int64_t m = 0; m < num_means; m++) {
        const int64_t key = means[3 * m], first = means[3 * m + 1], last = means[3 * m + 2];
        if (key < 0 || key >= bags->keys || first < 0 || last < first || last > columns)
            return 0;
        for (int64_t b = 0; b < bags->batch; b++) {
            const int64_t length = length_at(bags, key * bags->batch + b);
            const float scale = 1.0f / (float)(length > 1 ? length : 1);
            for (int64_t c = first; c < last; c++) {
                float value;
                memcpy(&value, out + 4 * (b * columns + c), 4);
                value *= scale;
                memcpy(out + 4 * (b * columns + c), &value, 4);
            }
        }
    }
    return 1;
}

PyDoc_STRVAR(join_doc,
             "join(found, means, data, bags, columns, into)\n--\n\n"
             "Float32 [batch, columns] of the ranks' answers, zero in columns without an answer.\n\n"
             "found: a recinfer.serving.shards.rank_structs.RankAnswer of each rank.\n"
             "means: int64 [M, 3], key, first and last column to divide by the numbers of ids of the key's bags, which are `bags`\n"
             "(recinfer.quant.bags.BagPlaces) in the bytes `data`.\n"
             "into: a writable float32 buffer of [batch, columns], or bytes that the answer begins with.\n\n"
             "Returns the answer as bytes, or True when it was written `into`. Raises ValueError for an answer of another size.");

static PyObject *join_method(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *found, *means_object, *data, *places, *into, *answer = NULL, *result = NULL;
    Py_ssize_t columns;
    Bags bags;
    Py_buffer means, out = {0};
    if (!PyArg_ParseTuple(args, "O!OSO!nO", &PyList_Type, &found, &means_object, &data, &PyTuple_Type, &places, &columns,
                          &into) ||
        !read_bags(places, (const uint8_t *)PyBytes_AsString(data), PyBytes_Size(data), 4, &bags) ||
        PyObject_GetBuffer(means_object, &means, PyBUF_SIMPLE) < 0)
        return NULL;
    const Py_ssize_t batch = bags.batch;
    if (columns < 0 || (columns && batch > PY_SSIZE_T_MAX / 64 / columns)) {
        PyErr_SetString(PyExc_ValueError, "join: more columns than fit in memory");
        goto release_means;
    }
    const Py_ssize_t num_bytes = 4 * batch * columns;
    uint8_t *target;
    if (PyBytes_Check(into)) {
        const Py_ssize_t head = PyBytes_Size(into);
        answer = PyBytes_FromStringAndSize(NULL, head + num_bytes);
        if (answer == NULL)
            goto release_means;
        target = (uint8_t *)PyBytes_AsString(answer);
        memcpy(target, PyBytes_AsString(into), (size_t)head);
        target += head;
    } else {
        if (PyObject_GetBuffer(into, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
            goto release_means;
        if (out.len != num_bytes) {
            PyErr_SetString(PyExc_ValueError, "join: the answer is not of [batch, columns] float32");
            goto release_out;
        }
        target = out.buf;
    }
    memset(target, 0, (size_t)num_bytes);
    for (Py_ssize_t r = 0; r < PyList_Size(found); r++)
        if (!put_rank(PyList_GetItem(found, r), target, columns, batch))
            goto release_out;
    if (!divide(means.buf, means.len / (Py_ssize_t)(3 * sizeof(int64_t)), &bags, target, columns)) {
        PyErr_SetString(PyExc_ValueError, "join: a mean of columns outside the answer");
        goto release_out;
    }
    result = answer != NULL ? answer : Py_True;
    Py_INCREF(result);
release_out:
    if (out.obj != NULL)
        PyBuffer_Release(&out);
release_means:
    PyBuffer_Release(&means);
    Py_XDECREF(answer);
    return result;
}

static PyMethodDef methods[] = {{"is_packed_answer", is_packed_method, METH_VARARGS, is_packed_doc},
                                {"join", join_method, METH_VARARGS, join_doc},
                                {"read_find", read_method, METH_O, read_doc},
                                {"split", split_method, METH_VARARGS, split_doc},
                                {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                        "_ranks",
                                        "Small plain requests between a ranker and its shard servers, from bytes to bytes.",
                                        0,
                                        methods,
                                        slots,
                                        NULL,
                                        NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__ranks(void) { return PyModuleDef_Init(&definition); }
