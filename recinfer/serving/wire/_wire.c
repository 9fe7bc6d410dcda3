/* Finds the parts of a small plain LookupRequest or PredictRequest in its bytes.

   A message with unusual, malformed or optional parts (weights, raw rows, fields in pieces, a context of several samples) gives None:
   the protobuf runtime then reads the message and reports its errors.

   Strings of the Open Inference Protocol's raw contents, of which each follows its length, are taken apart here too. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_reader.h"

typedef struct {
    Span keys; /* the fields of all keys, with their tags */
    Span lengths, values, values_int32;
    uint64_t batch;
    Py_ssize_t num_keys;
} Features;

/* recinfer.serving.engine.request.RequestParts, in the order of its fields. */
typedef struct {
    Span model, version, dense;
    Features features, context;
} RequestParts;

static int once(Span *target, Span span) {
    if (target->at != NULL)
        return 0;
    *target = span;
    return 1;
}

static int read_features(Span message, Features *features) {
    Reader reader = {message.at, message.at + message.size};
    int has_batch = 0;
    while (reader.at < reader.end) {
        const uint8_t *begin = reader.at;
        uint64_t tag;
        Span span;
        if (!read_tag(&reader, &tag))
            return 0;
        if (tag == (2 << 3 | VARINT)) {
            if (has_batch || !read_varint(&reader, &features->batch))
                return 0;
            has_batch = 1;
            continue;
        }
        if ((tag & 7) != DELIMITED || !read_span(&reader, &span))
            return 0;
        switch (tag >> 3) {
        case 1:
            if (features->num_keys == 0)
                features->keys.at = begin;
            else if (features->keys.at + features->keys.size != begin)
                return 0;
            features->keys.size = reader.at - features->keys.at;
            features->num_keys++;
            break;
        case 3:
            if (!once(&features->lengths, span))
                return 0;
            break;
        case 4:
            if (!once(&features->values, span))
                return 0;
            break;
        case 6:
            if (!once(&features->values_int32, span))
                return 0;
            break;
        default:
            return 0;
        }
    }
    return has_batch && features->num_keys && features->batch >= 1 && features->batch <= INT32_MAX;
}

/* Whether the features hold one length per bag, and ids of one width. */
static int is_whole(const Features *features) {
    const Span *ids = features->values_int32.size ? &features->values_int32 : &features->values;
    if (features->values.size && features->values_int32.size)
        return 0;
    return ids->size % (features->values_int32.size ? 4 : 8) == 0 &&
           (uint64_t)features->lengths.size == 4 * features->batch * (uint64_t)features->num_keys;
}

static int read_request(const uint8_t *data, Py_ssize_t size, RequestParts *parts) {
    Reader reader = {data, data + size};
    Span features = {NULL, 0}, context = {NULL, 0};
    while (reader.at < reader.end) {
        uint64_t tag;
        Span span, *target;
        if (!read_tag(&reader, &tag) || (tag & 7) != DELIMITED || !read_span(&reader, &span))
            return 0;
        switch (tag >> 3) {
        case 1:
            target = &parts->model;
            break;
        case 2:
            target = &parts->version;
            break;
        case 3:
            target = &features;
            break;
        case 4:
            target = &parts->dense;
            break;
        case 5:
            target = &context;
            break;
        default:
            return 0;
        }
        if (!once(target, span))
            return 0;
    }
    if (features.at == NULL || !read_features(features, &parts->features) || !is_whole(&parts->features))
        return 0;
    return context.at == NULL ||
           (read_features(context, &parts->context) && parts->context.batch == 1 && is_whole(&parts->context));
}

/* The bytes of the keys, and a recinfer.quant.bags.BagPlaces without its name. */
static PyObject *places_of(const Features *features, const uint8_t *bytes) {
    const int wide = features->values_int32.size == 0;
    const Span *ids = wide ? &features->values : &features->values_int32;
    return Py_BuildValue("y#(nnnOnn)", (const char *)features->keys.at, features->keys.size, features->lengths.at - bytes,
                         ids->at == NULL ? (Py_ssize_t)0 : (Py_ssize_t)(ids->at - bytes), ids->size / (wide ? 8 : 4),
                         wide ? Py_True : Py_False, features->num_keys, (Py_ssize_t)features->batch);
}

PyDoc_STRVAR(read_doc,
             "read_request(data)\n--\n\n"
             "The fields of a recinfer.serving.engine.request.RequestParts for a serialized LookupRequest or PredictRequest;\n"
             "None for a request of another form. features and context are (bytes of the keys, the fields of a\n"
             "recinfer.quant.bags.BagPlaces); context may be None, as in a LookupRequest. Places are offsets in `data`. The ids\n"
             "are not checked.");

static PyObject *read_method(PyObject *module, PyObject *data) {
    (void)module;
    if (!PyBytes_Check(data)) {
        PyErr_SetString(PyExc_TypeError, "read_request: expected bytes");
        return NULL;
    }
    const uint8_t *bytes = (const uint8_t *)PyBytes_AsString(data);
    RequestParts parts = {0};
    if (!read_request(bytes, PyBytes_Size(data), &parts))
        Py_RETURN_NONE;
    PyObject *features = places_of(&parts.features, bytes), *context = Py_None;
    if (parts.context.num_keys)
        context = places_of(&parts.context, bytes);
    else
        Py_INCREF(context);
    if (features == NULL || context == NULL) {
        Py_XDECREF(features);
        Py_XDECREF(context);
        return NULL;
    }
    PyObject *found = Py_BuildValue(
        "s#s#nnNN", parts.model.at == NULL ? "" : (const char *)parts.model.at, parts.model.size,
        parts.version.at == NULL ? "" : (const char *)parts.version.at, parts.version.size,
        parts.dense.at == NULL ? (Py_ssize_t)0 : (Py_ssize_t)(parts.dense.at - bytes), parts.dense.size, features, context);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return found;
}

PyDoc_STRVAR(split_doc,
             "split(data, count)\n--\n\n"
             "The bytes of `count` strings, one after another, and the bytes of their lengths, int32 [count], from `data`, where each\n"
             "string follows its length of 4 bytes, little-endian. None if `data` is no such strings.");

/* Move the bytes and lengths of `count` strings from `data` to `to` and `sizes`; 0 if `data` is no such strings. */
static int take_apart(const char *data, Py_ssize_t left, Py_ssize_t count, char *to, char *sizes) {
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t length;
        const Py_ssize_t most = left - 4 * (count - i); /* 4 bytes are left for the length of each following string */
        if (most < 0)
            return 0;
        memcpy(&length, data, 4);
        if ((Py_ssize_t)length > most || length > INT32_MAX)
            return 0;
        memcpy(sizes + 4 * i, &length, 4);
        memcpy(to, data + 4, length);
        to += length;
        data += 4 + (Py_ssize_t)length;
        left -= 4 + (Py_ssize_t)length;
    }
    return left == 0;
}

static PyObject *split_method(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer data;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*n", &data, &count))
        return NULL;
    PyObject *joined = NULL, *lengths = NULL, *result = NULL;
    if (count < 0 || count > data.len / 4) {
        result = Py_NewRef(Py_None);
    } else {
        joined = PyBytes_FromStringAndSize(NULL, data.len - 4 * count);
        lengths = PyBytes_FromStringAndSize(NULL, 4 * count);
        if (joined != NULL && lengths != NULL)
            result = take_apart(data.buf, data.len, count, PyBytes_AsString(joined), PyBytes_AsString(lengths))
                         ? PyTuple_Pack(2, joined, lengths)
                         : Py_NewRef(Py_None);
    }
    Py_XDECREF(joined);
    Py_XDECREF(lengths);
    PyBuffer_Release(&data);
    return result;
}

static PyMethodDef methods[] = {
    {"read_request", read_method, METH_O, read_doc}, {"split", split_method, METH_VARARGS, split_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_wire", "Finds the parts of a small request, and takes strings apart.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__wire(void) { return PyModuleDef_Init(&definition); }
