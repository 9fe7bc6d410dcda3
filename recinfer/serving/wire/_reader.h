/* Bounds-checked reading of protobuf's wire format, for the compiled loops of this folder. */

#ifndef RECINFER_WIRE_READER_H
#define RECINFER_WIRE_READER_H

#include <Python.h>
#include <stdint.h>

enum { VARINT = 0, DELIMITED = 2 };

typedef struct {
    const uint8_t *at, *end;
} Reader;

typedef struct {
    const uint8_t *at;
    Py_ssize_t size;
} Span;

/* Read the next varint into `value`; return 0 if it is cut off or longer than 63 bits. */
static inline int read_varint(Reader *reader, uint64_t *value) {
    *value = 0;
    for (int shift = 0; shift < 63 && reader->at < reader->end; shift += 7) {
        const uint8_t byte = *reader->at++;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            return 1;
    }
    return 0;
}

/* Read the tag of a field below 16, which encoders write as one byte; return 0 for any other. protobuf itself refuses a tag of more
   than five bytes. */
static inline int read_tag(Reader *reader, uint64_t *tag) {
    if (reader->at == reader->end || *reader->at >= 0x80)
        return 0;
    *tag = *reader->at++;
    return 1;
}

static inline int read_span(Reader *reader, Span *span) {
    uint64_t size;
    if (!read_varint(reader, &size) || size > (uint64_t)(reader->end - reader->at))
        return 0;
    span->at = reader->at;
    span->size = (Py_ssize_t)size;
    reader->at += size;
    return 1;
}

#endif
