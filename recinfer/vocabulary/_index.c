/* The id index of recinfer/archive/FORMAT.md, rules V3 to V6: built, checked, changed, and probed for the ids of requests.

   An index is an array of buckets of one cache line. An id lies in its home bucket or in its second one, and in the second only where
   the home bucket says that some of its ids do, so that a probe reads at most two buckets, whatever the id and the load. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS 5
#define AHEAD 16 /* ids between the fetch of a bucket and its probe */
#define LONG_WORK 4096 /* ids for which other Python threads run meanwhile */

typedef struct {
    int64_t ids[SLOTS];
    uint32_t rows[SLOTS];
    uint8_t used, away; /* slots in use, the first ones; 1 if an id whose home this bucket is may be in its second bucket */
    uint16_t zero;
} Bucket;

_Static_assert(sizeof(Bucket) == 64, "a bucket is a cache line");

typedef struct {
    Bucket *buckets;
    uint64_t sections, section_buckets, seed, count;
} Index;

/* The finalizer of MurmurHash3. */
static inline uint64_t mixed(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdu;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

static inline uint64_t turned(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

/* The hash of FBGEMM's zero_collision_hash: MurmurHash3 (x64, 128 bits) of the 16 bytes of the id and 0, both halves joined by xor. */
static uint64_t murmur3(uint64_t id) {
    uint64_t one = turned(turned(id * 0x87c37b91114253d5u, 31) * 0x4cf5ad432745937fu, 27) * 5 + 0x52dce729;
    uint64_t two = one * 5 + 0x38495ab5;
    one ^= 16;
    two ^= 16;
    one += two;
    two += one;
    one = mixed(one);
    two = mixed(two);
    one += two;
    two += one;
    return one ^ two;
}

static inline uint64_t hash_of(const Index *index, int64_t id) { return mixed((uint64_t)id ^ index->seed); }

static inline uint64_t bucket_of(const Index *index, uint64_t hash) {
    return ((hash >> 32) * index->sections >> 32) * index->section_buckets + (hash & (index->section_buckets - 1));
}

static inline uint64_t home_of(const Index *index, int64_t id) { return bucket_of(index, hash_of(index, id)); }

static inline uint64_t second_of(const Index *index, int64_t id) {
    return bucket_of(index, turned(hash_of(index, id), 32) * 0x9e3779b97f4a7c15u);
}

/* The place of an id in a bucket, SLOTS if it is not there; without a branch, which would often be predicted wrong. */
static inline int place_in(const Bucket *bucket, int64_t id) {
    unsigned found = 0;
    for (int i = 0; i < SLOTS; i++)
        found |= (unsigned)(bucket->ids[i] == id) << i;
    found &= (1u << bucket->used) - 1;
    return __builtin_ctz(found | 1u << SLOTS);
}

static inline int64_t row_at(const Bucket *bucket, int place) {
    uint32_t row;
    memcpy(&row, (const uint8_t *)bucket + offsetof(Bucket, rows) + 4 * place, 4); /* for SLOTS, bytes that mean nothing */
    return row;
}

/* -- segments ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t first_row, num_rows, miss_row, miss_rows;
} Segment;

typedef struct {
    const Segment *all;
    uint64_t count, block; /* ids of a segment; 0: segments take turns */
} Segments;

static inline uint64_t segment_of(const Segments *segments, int64_t id) {
    if (segments->count == 1)
        return 0;
    if (!segments->block) {
        const int64_t rest = id % (int64_t)segments->count;
        return (uint64_t)(rest < 0 ? rest + (int64_t)segments->count : rest);
    }
    const uint64_t segment = (uint64_t)id / segments->block;
    return segment < segments->count ? segment : (uint64_t)id % segments->count;
}

static int64_t missed_row(const Segments *segments, int64_t id) {
    const Segment *segment = segments->all + segment_of(segments, id);
    if (segment->miss_rows == 1)
        return segment->miss_row;
    return segment->miss_rows ? segment->miss_row + (int64_t)(murmur3((uint64_t)id) % (uint64_t)segment->miss_rows) : -1;
}

/* -- arguments --------------------------------------------------------------------------------------------------------- */

static int open_index(const Py_buffer *view, unsigned long long sections, unsigned long long section_buckets,
                      unsigned long long seed, Index *index) {
    *index = (Index){view->buf, sections, section_buckets, seed, sections * section_buckets};
    if (!sections || sections > 31 || !section_buckets || section_buckets > UINT32_MAX || section_buckets & (section_buckets - 1) ||
        (uint64_t)view->len != index->count * sizeof(Bucket)) {
        PyErr_SetString(PyExc_ValueError, "an index whose size is not the one of its buckets");
        return 0;
    }
    return 1;
}

/* Views of the index and of two int64 arrays of one length; 0 with an error. `close_views` in any case. */
typedef struct {
    Py_buffer index, ids, rows;
} Views;

static void close_views(Views *views) {
    Py_buffer *all[] = {&views->index, &views->ids, &views->rows};
    for (int i = 0; i < 3; i++)
        if (all[i]->obj != NULL)
            PyBuffer_Release(all[i]);
}

static int open_views(PyObject *args, Views *views, Index *index) {
    PyObject *buffer, *ids, *rows;
    unsigned long long sections, section_buckets, seed;
    memset(views, 0, sizeof *views);
    if (!PyArg_ParseTuple(args, "OKKKOO", &buffer, &sections, &section_buckets, &seed, &ids, &rows) ||
        PyObject_GetBuffer(buffer, &views->index, PyBUF_WRITABLE) < 0 || PyObject_GetBuffer(ids, &views->ids, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(rows, &views->rows, PyBUF_SIMPLE) < 0 || !open_index(&views->index, sections, section_buckets, seed, index))
        return 0;
    if (views->ids.len != views->rows.len || views->ids.len % 8) {
        PyErr_SetString(PyExc_ValueError, "ids and rows are not int64 of one length");
        return 0;
    }
    return 1;
}

/* -- building and changing --------------------------------------------------------------------------------------------- */

static inline int put(Bucket *bucket, int64_t id, int64_t row) {
    if (bucket->used == SLOTS)
        return 0;
    bucket->ids[bucket->used] = id;
    bucket->rows[bucket->used++] = (uint32_t)row;
    return 1;
}

/* Put an id into its second bucket; 0 if that is full. */
static int put_away(const Index *index, int64_t id, int64_t row) {
    if (!put(index->buckets + second_of(index, id), id, row))
        return 0;
    index->buckets[home_of(index, id)].away = 1;
    return 1;
}

#define MOST_MOVES 1000

/* Put an id into its full home bucket, by moving another id from there to its second bucket; 0 if these are full too. */
static int put_instead(const Index *index, int64_t id, int64_t row) {
    const uint64_t home = home_of(index, id);
    Bucket *bucket = index->buckets + home;
    for (int place = 0; place < SLOTS; place++)
        if (home_of(index, bucket->ids[place]) == home && put_away(index, bucket->ids[place], bucket->rows[place])) {
            bucket->ids[place] = id;
            bucket->rows[place] = (uint32_t)row;
            return 1;
        }
    return 0;
}

/* Add an id that the index lacks. Where both of its buckets are full and no other id gives way, it takes the slot of another id, which
   goes to its own other bucket, and so on. 0 if that does not end: some id is lost then. */
static int insert(const Index *index, int64_t id, int64_t row) {
    uint64_t random = (uint64_t)id;
    for (int move = 0; move < MOST_MOVES; move++) {
        if (put(index->buckets + home_of(index, id), id, row) || put_away(index, id, row) || put_instead(index, id, row))
            return 1;
        random = mixed(random + 1);
        const int to_second = (int)(random >> 63);
        Bucket *bucket = index->buckets + (to_second ? second_of(index, id) : home_of(index, id));
        if (to_second)
            index->buckets[home_of(index, id)].away = 1;
        const int place = (int)(random % SLOTS);
        const int64_t other = bucket->ids[place], other_row = bucket->rows[place];
        bucket->ids[place] = id;
        bucket->rows[place] = (uint32_t)row;
        id = other;
        row = other_row;
    }
    return 0;
}

/* Take an id out, if it is there. */
static void take_out(const Index *index, int64_t id) {
    const uint64_t both[] = {home_of(index, id), second_of(index, id)};
    for (int i = 0; i < 2; i++) {
        Bucket *bucket = index->buckets + both[i];
        const int place = place_in(bucket, id);
        if (place == SLOTS)
            continue;
        const int last = --bucket->used;
        bucket->ids[place] = bucket->ids[last];
        bucket->rows[place] = bucket->rows[last];
        bucket->ids[last] = 0;
        bucket->rows[last] = 0;
        return;
    }
}

PyDoc_STRVAR(change_doc,
             "change(buckets, sections, section_buckets, seed, ids, rows)\n--\n\n"
             "Give each of `ids`, int64, each once, its row of `rows`, int64; -1 takes the id out. False if the index is too full:\n"
             "an id is missing from it then.");

static PyObject *change_method(PyObject *module, PyObject *args) {
    (void)module;
    Views views;
    Index index;
    PyObject *result = NULL;
    if (open_views(args, &views, &index)) {
        const int64_t *ids = views.ids.buf, *rows = views.rows.buf;
        const Py_ssize_t n = views.ids.len / 8;
        int fits = 1;
        Py_BEGIN_ALLOW_THREADS
        for (int pass = 0; pass < 2; pass++)
            for (Py_ssize_t i = 0; i < n && fits; i++) {
                if (i + AHEAD < n)
                    __builtin_prefetch(index.buckets + home_of(&index, ids[i + AHEAD]), 1);
                if (!pass)
                    take_out(&index, ids[i]);
                else if (rows[i] >= 0)
                    fits = insert(&index, ids[i], rows[i]);
            }
        Py_END_ALLOW_THREADS
        result = Py_NewRef(fits ? Py_True : Py_False);
    }
    close_views(&views);
    return result;
}

/* Fill empty buckets: first all ids that fit at home, so that most are there, then the others. 0 if one has no place, -1 without
   memory. */
static int fill(const Index *index, const int64_t *ids, const int64_t *rows, Py_ssize_t n) {
    Py_ssize_t *others = NULL, count = 0, room = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (i + AHEAD < n)
            __builtin_prefetch(index->buckets + home_of(index, ids[i + AHEAD]), 1);
        if (put(index->buckets + home_of(index, ids[i]), ids[i], rows[i]))
            continue;
        if (count == room) {
            room = room ? 2 * room : 1024;
            Py_ssize_t *more = realloc(others, (size_t)room * sizeof *others);
            if (more == NULL) {
                free(others);
                return -1;
            }
            others = more;
        }
        others[count++] = i;
    }
    int fits = 1;
    for (int pass = 0; pass < 2; pass++) { /* the second one moves ids */
        Py_ssize_t left = 0;
        for (Py_ssize_t i = 0; i < count && fits; i++) {
            const Py_ssize_t at = others[i];
            if (pass)
                fits = insert(index, ids[at], rows[at]);
            else if (!put_away(index, ids[at], rows[at]))
                others[left++] = at;
        }
        count = left;
    }
    free(others);
    return fits;
}

PyDoc_STRVAR(build_doc,
             "build(buckets, sections, section_buckets, seed, ids, rows)\n--\n\n"
             "Add `ids`, int64, each once, with their `rows`, int64, to empty buckets. False if an id has no place.");

static PyObject *build_method(PyObject *module, PyObject *args) {
    (void)module;
    Views views;
    Index index;
    PyObject *result = NULL;
    if (open_views(args, &views, &index)) {
        int fits;
        Py_BEGIN_ALLOW_THREADS
        fits = fill(&index, views.ids.buf, views.rows.buf, views.ids.len / 8);
        Py_END_ALLOW_THREADS
        result = fits < 0 ? PyErr_NoMemory() : Py_NewRef(fits ? Py_True : Py_False);
    }
    close_views(&views);
    return result;
}

/* -- checking ---------------------------------------------------------------------------------------------------------- */

enum { SOUND, SLOTS_WRONG, ROW_OUTSIDE, ID_LOST, ID_TWICE, ROW_TWICE };

/* What is wrong with the ids of a bucket, and the place of the first one that is. `taken`: a bit for each row. */
static int check_bucket(const Index *index, const Segments *segments, uint64_t number, uint64_t rows, uint8_t *taken, int *place) {
    const Bucket *bucket = index->buckets + number;
    *place = 0;
    if (bucket->used > SLOTS || bucket->away > 1 || bucket->zero)
        return SLOTS_WRONG;
    for (int i = bucket->used; i < SLOTS; i++)
        if (bucket->ids[i] || bucket->rows[i])
            return SLOTS_WRONG;
    for (int i = 0; i < bucket->used; i++) {
        *place = i;
        const int64_t id = bucket->ids[i];
        const uint64_t row = bucket->rows[i];
        if (row >= rows)
            return ROW_OUTSIDE;
        if (taken[row >> 3] >> (row & 7) & 1)
            return ROW_TWICE;
        taken[row >> 3] |= (uint8_t)(1u << (row & 7));
        if (segments->count > 1) {
            const Segment *own = segments->all + segment_of(segments, id);
            if ((int64_t)row < own->first_row || (int64_t)row >= own->first_row + own->num_rows)
                return ROW_OUTSIDE;
        }
        const uint64_t home = home_of(index, id);
        if (home != number) {
            const Bucket *own = index->buckets + home;
            if (second_of(index, id) != number || !own->away)
                return ID_LOST;
            if (own->used <= SLOTS && place_in(own, id) < SLOTS)
                return ID_TWICE;
        }
        for (int j = 0; j < i; j++)
            if (bucket->ids[j] == id)
                return ID_TWICE;
    }
    return SOUND;
}

static int read_segments(PyObject *object, Py_buffer *view, unsigned long long block, Segments *segments) {
    if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0)
        return 0;
    *segments = (Segments){view->buf, (uint64_t)view->len / sizeof(Segment), block};
    if (!segments->count || view->len % (Py_ssize_t)sizeof(Segment)) {
        PyErr_SetString(PyExc_ValueError, "segments are not int64 [S, 4]");
        return 0;
    }
    return 1;
}

PyDoc_STRVAR(check_doc,
             "check(buckets, sections, section_buckets, seed, rows, segments, block)\n--\n\n"
             "(what is wrong, number of the bucket, place in it, ids): 0 if nothing is, 1 a slot, 2 a row, 3 an id that no probe\n"
             "finds, 4 an id and 5 a row that occurs twice. `rows` of the table; `segments`, int64 [S, 4], with `block` ids each.");

static PyObject *check_method(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *buffer, *segments_object, *result = NULL;
    unsigned long long sections, section_buckets, seed, rows, block;
    Py_buffer view = {0}, segments_view = {0};
    uint8_t *taken = NULL;
    Index index;
    Segments segments;
    if (!PyArg_ParseTuple(args, "OKKKKOK", &buffer, &sections, &section_buckets, &seed, &rows, &segments_object, &block) ||
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE) < 0 || !open_index(&view, sections, section_buckets, seed, &index) ||
        !read_segments(segments_object, &segments_view, block, &segments))
        goto close;
    taken = calloc(rows / 8 + 1, 1);
    if (taken == NULL) {
        PyErr_NoMemory();
        goto close;
    }
    uint64_t number = 0, ids = 0;
    int wrong = SOUND, place = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; number < index.count; number++) {
        wrong = check_bucket(&index, &segments, number, rows, taken, &place);
        if (wrong)
            break;
        ids += index.buckets[number].used;
    }
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("iKiK", wrong, (unsigned long long)number, place, (unsigned long long)ids);
close:
    free(taken);
    if (view.obj != NULL)
        PyBuffer_Release(&view);
    if (segments_view.obj != NULL)
        PyBuffer_Release(&segments_view);
    return result;
}

/* -- probing ----------------------------------------------------------------------------------------------------------- */

/* An index and its segments, as recinfer.vocabulary.step lists them: addresses and numbers. */
typedef struct {
    uint64_t buckets, sections, section_buckets, seed, segments, num_segments, block;
} Table;

/* A key of a request: its table, -1 without a vocabulary, and its place among the counters. */
typedef struct {
    int64_t table, counter;
} Key;

typedef struct {
    int64_t hits, misses;
} Counter;

typedef struct {
    Index index;
    Segments segments;
} Opened;

static inline Opened opened(const Table *table) {
    return (Opened){{(Bucket *)(uintptr_t)table->buckets, table->sections, table->section_buckets, table->seed,
                     table->sections * table->section_buckets},
                    {(const Segment *)(uintptr_t)table->segments, table->num_segments, table->block}};
}

/* The ids of a request; int32 unless `wide`. */
typedef struct {
    const uint8_t *at;
    int wide;
} Ids;

static inline int64_t id_at(Ids ids, int64_t i) {
    if (ids.wide) {
        int64_t id;
        memcpy(&id, ids.at + 8 * i, 8);
        return id;
    }
    int32_t id;
    memcpy(&id, ids.at + 4 * i, 4);
    return id;
}

#define BLOCK 16 /* ids whose buckets are fetched at once: a core keeps few fetches in flight, and drops or delays more */

/* Fetch the home buckets of ids `first` to before `stop`, at most BLOCK. */
static inline void fetch(const Index *index, Ids ids, int64_t first, int64_t stop, uint64_t *homes) {
    for (int64_t i = first; i < stop; i++) {
        homes[i - first] = home_of(index, id_at(ids, i));
        __builtin_prefetch(index->buckets + homes[i - first]);
    }
}

/* The ids of a block that are not in their home buckets: those that may be in their second buckets, which are fetched, and the others,
   by their places in the block. */
typedef struct {
    int64_t start;
    int num_away, num_missed;
    uint64_t seconds[BLOCK];
    uint8_t away[BLOCK + 1], missed[BLOCK + 1]; /* one more, which is written and not read */
} Left;

/* Rows of the ids that a block has left. Returns the number of misses. */
static int64_t finish(const Opened *table, Ids ids, Left *left, uint8_t *out) {
    for (int j = 0; j < left->num_away; j++) {
        const Bucket *bucket = table->index.buckets + left->seconds[j];
        const int64_t i = left->start + left->away[j];
        const int place = place_in(bucket, id_at(ids, i));
        const int64_t row = row_at(bucket, place);
        memcpy(out + 8 * i, &row, 8);
        left->missed[left->num_missed] = left->away[j];
        left->num_missed += place == SLOTS;
    }
    for (int j = 0; j < left->num_missed; j++) {
        const int64_t i = left->start + left->missed[j], row = missed_row(&table->segments, id_at(ids, i));
        memcpy(out + 8 * i, &row, 8);
    }
    return left->num_missed;
}

/* Rows of ids `first` to before `stop` of one table. Returns the number of misses.

   A block of ids goes through loops of its own, so that none waits for memory: fetch the home buckets (of the next block, while this
   one's arrive), probe them, fetch the second buckets of the few ids that may be there, and probe these after the next block. */
static int64_t probe(const Opened *table, Ids ids, int64_t first, int64_t stop, uint8_t *out) {
    const Index *index = &table->index;
    uint64_t homes[2][BLOCK];
    Left lefts[2]; /* of this block and the one before */
    lefts[1].num_away = lefts[1].num_missed = 0;
    int64_t misses = 0;
    int turn = 0;
    fetch(index, ids, first, stop - first < BLOCK ? stop : first + BLOCK, homes[0]);
    for (int64_t start = first; start < stop; start += BLOCK, turn = !turn) {
        const int64_t end = stop - start < BLOCK ? stop : start + BLOCK;
        fetch(index, ids, end, stop - end < BLOCK ? stop : end + BLOCK, homes[!turn]);
        Left *left = lefts + turn;
        int num_away = 0, num_missed = 0;
        for (int64_t i = start; i < end; i++) {
            const Bucket *bucket = index->buckets + homes[turn][i - start];
            const int place = place_in(bucket, id_at(ids, i)), nowhere = place == SLOTS;
            const int64_t row = row_at(bucket, place);
            memcpy(out + 8 * i, &row, 8);
            left->away[num_away] = left->missed[num_missed] = (uint8_t)(i - start);
            num_away += nowhere & bucket->away;
            num_missed += nowhere & !bucket->away;
        }
        for (int j = 0; j < num_away; j++) {
            left->seconds[j] = second_of(index, id_at(ids, start + left->away[j]));
            __builtin_prefetch(index->buckets + left->seconds[j]);
        }
        left->start = start;
        left->num_away = num_away;
        left->num_missed = num_missed;
        misses += finish(table, ids, lefts + !turn, out);
    }
    return misses + finish(table, ids, lefts + !turn, out);
}

/* Write the rows of all ids `out`, int64; ids of keys without a table stay. `counters` of each key receive the numbers. */
static void remap(const Table *tables, const Key *keys, int64_t num_keys, const int64_t *edges, Ids ids, uint8_t *out, Counter *found) {
    if (edges[num_keys] <= 4 * num_keys) /* few ids per key: their buckets are fetched before the first probe */
        for (int64_t k = 0; k < num_keys; k++) {
            if (keys[k].table < 0)
                continue;
            const Opened table = opened(tables + keys[k].table);
            for (int64_t i = edges[k]; i < edges[k + 1]; i++)
                __builtin_prefetch(table.index.buckets + home_of(&table.index, id_at(ids, i)));
        }
    for (int64_t k = 0; k < num_keys; k++) {
        if (keys[k].table < 0) {
            for (int64_t i = edges[k]; i < edges[k + 1]; i++) {
                const int64_t id = id_at(ids, i);
                memcpy(out + 8 * i, &id, 8);
            }
            continue;
        }
        const Opened table = opened(tables + keys[k].table);
        const int64_t misses = probe(&table, ids, edges[k], edges[k + 1], out);
        found[k] = (Counter){edges[k + 1] - edges[k] - misses, misses};
    }
}

/* The plan of one order of keys: tables, keys and counters. */
typedef struct {
    Py_buffer tables, keys, counters;
    int64_t num_keys;
    int64_t *edges; /* [keys + 1], and the Counter of each key behind them */
    Counter *found;
} Plan;

static void close_plan(Plan *plan) {
    Py_buffer *all[] = {&plan->tables, &plan->keys, &plan->counters};
    for (int i = 0; i < 3; i++)
        if (all[i]->obj != NULL)
            PyBuffer_Release(all[i]);
    PyMem_Free(plan->edges);
}

static int open_plan(PyObject *tables, PyObject *keys, PyObject *counters, Plan *plan) {
    if (PyObject_GetBuffer(tables, &plan->tables, PyBUF_SIMPLE) < 0 || PyObject_GetBuffer(keys, &plan->keys, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(counters, &plan->counters, PyBUF_WRITABLE) < 0)
        return 0;
    plan->num_keys = plan->keys.len / (Py_ssize_t)sizeof(Key);
    const int64_t num_tables = plan->tables.len / (Py_ssize_t)sizeof(Table);
    const int64_t num_counters = plan->counters.len / (Py_ssize_t)sizeof(Counter);
    const Key *each = plan->keys.buf;
    for (int64_t k = 0; k < plan->num_keys; k++)
        if (each[k].table >= num_tables || (each[k].table >= 0 && (each[k].counter < 0 || each[k].counter >= num_counters))) {
            PyErr_SetString(PyExc_ValueError, "a key of a table or a counter that there is not");
            return 0;
        }
    plan->edges = PyMem_Calloc((size_t)plan->num_keys + 1, sizeof(int64_t) + sizeof(Counter));
    if (plan->edges == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    plan->found = (Counter *)(plan->edges + plan->num_keys + 1);
    return 1;
}

static void run(Plan *plan, const int64_t *edges, Ids ids, uint8_t *out) {
    const int64_t n = edges[plan->num_keys];
    if (n > LONG_WORK) {
        Py_BEGIN_ALLOW_THREADS
        remap(plan->tables.buf, plan->keys.buf, plan->num_keys, edges, ids, out, plan->found);
        Py_END_ALLOW_THREADS
    } else {
        remap(plan->tables.buf, plan->keys.buf, plan->num_keys, edges, ids, out, plan->found);
    }
    Counter *counters = plan->counters.buf; /* changed under the GIL alone */
    const Key *keys = plan->keys.buf;
    for (int64_t k = 0; k < plan->num_keys; k++)
        if (keys[k].table >= 0) {
            counters[keys[k].counter].hits += plan->found[k].hits;
            counters[keys[k].counter].misses += plan->found[k].misses;
        }
}

PyDoc_STRVAR(remap_doc,
             "remap(tables, keys, counters, ids, edges, out)\n--\n\n"
             "Write the row of each id `out`, int64 [N]; ids of keys without a vocabulary stay, and -1 stands for no row.\n\n"
             "tables: int64 [T, 7], see Table. keys: int64 [K, 2], table (-1: none) and counter. counters: int64 [C, 2], hits and\n"
             "misses, which are increased. ids: int32 or int64 [N]. edges: int64 [K + 1], ascending from 0 to N.");

static PyObject *remap_method(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tables, *keys, *counters, *ids_object, *edges_object, *out_object, *result = NULL;
    Py_buffer ids = {0}, edges = {0}, out = {0};
    Plan plan = {0};
    if (!PyArg_ParseTuple(args, "OOOOOO", &tables, &keys, &counters, &ids_object, &edges_object, &out_object) ||
        !open_plan(tables, keys, counters, &plan) || PyObject_GetBuffer(ids_object, &ids, PyBUF_ND) < 0 ||
        PyObject_GetBuffer(edges_object, &edges, PyBUF_ND) < 0 || PyObject_GetBuffer(out_object, &out, PyBUF_WRITABLE) < 0)
        goto close;
    const int64_t n = out.len / 8, *bounds = edges.buf;
    int fits = (ids.itemsize == 4 || ids.itemsize == 8) && ids.len == n * ids.itemsize && edges.len == 8 * (plan.num_keys + 1) &&
               bounds[0] == 0 && bounds[plan.num_keys] == n;
    for (int64_t k = 0; fits && k < plan.num_keys; k++)
        fits = bounds[k] <= bounds[k + 1];
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "remap: ids, edges and out do not fit together");
        goto close;
    }
    run(&plan, bounds, (Ids){ids.buf, ids.itemsize == 8}, out.buf);
    result = Py_NewRef(Py_None);
close:;
    Py_buffer *all[] = {&ids, &edges, &out};
    for (int i = 0; i < 3; i++)
        if (all[i]->obj != NULL)
            PyBuffer_Release(all[i]);
    close_plan(&plan);
    return result;
}

PyDoc_STRVAR(remap_bytes_doc,
             "remap_bytes(tables, keys, counters, data, batch, lengths_at, ids, ids_at, wide)\n--\n\n"
             "The bytes of the lengths, int32 [K * batch], and of the rows, int64 [ids], of bags in the bytes `data`; None if the\n"
             "lengths are not those of so many ids. tables, keys and counters: see remap.");

static PyObject *remap_bytes_method(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tables, *keys, *counters, *data, *result = NULL;
    Py_ssize_t batch, lengths_at, num_ids, ids_at;
    int wide;
    Plan plan = {0};
    if (!PyArg_ParseTuple(args, "OOOSnnnnp", &tables, &keys, &counters, &data, &batch, &lengths_at, &num_ids, &ids_at, &wide) ||
        !open_plan(tables, keys, counters, &plan))
        goto close;
    const Py_ssize_t size = PyBytes_Size(data), id_bytes = wide ? 8 : 4;
    if (batch < 0 || lengths_at < 0 || num_ids < 0 || ids_at < 0 || lengths_at > size || ids_at > size ||
        (plan.num_keys && batch > (size - lengths_at) / 4 / plan.num_keys) || num_ids > (size - ids_at) / id_bytes) {
        PyErr_SetString(PyExc_ValueError, "remap_bytes: places outside the bytes");
        goto close;
    }
    const uint8_t *bytes = (const uint8_t *)PyBytes_AsString(data);
    int64_t total = 0;
    for (int64_t k = 0; k < plan.num_keys; k++) {
        int32_t sign = 0;
        for (Py_ssize_t b = 0; b < batch; b++) {
            int32_t length;
            memcpy(&length, bytes + lengths_at + 4 * (k * batch + b), 4);
            sign |= length;
            total += length;
        }
        if (sign < 0 || total > num_ids)
            goto other;
        plan.edges[k + 1] = total;
    }
    if (total != num_ids)
        goto other;
    const Py_ssize_t lengths_size = 4 * plan.num_keys * batch;
    result = PyBytes_FromStringAndSize(NULL, lengths_size + 8 * num_ids);
    if (result == NULL)
        goto close;
    uint8_t *out = (uint8_t *)PyBytes_AsString(result);
    memcpy(out, bytes + lengths_at, (size_t)lengths_size);
    run(&plan, plan.edges, (Ids){bytes + ids_at, wide}, out + lengths_size);
    goto close;
other:
    result = Py_NewRef(Py_None);
close:
    close_plan(&plan);
    return result;
}

static PyMethodDef methods[] = {{"build", build_method, METH_VARARGS, build_doc},
                                {"change", change_method, METH_VARARGS, change_doc},
                                {"check", check_method, METH_VARARGS, check_doc},
                                {"remap", remap_method, METH_VARARGS, remap_doc},
                                {"remap_bytes", remap_bytes_method, METH_VARARGS, remap_bytes_doc},
                                {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_index", "The id index of a table: built, checked, changed and probed.", 0, methods, slots, NULL, NULL,
    NULL};

PyMODINIT_FUNC PyInit__index(void) { return PyModuleDef_Init(&definition); }
