/* Copies with non-temporal stores, which bypass the CPU caches.

   An ordinary store reads its cache line from memory before it fills it. For weights,
   which are larger than any cache, that is a third of all traffic, and evicts all other
   data. Non-temporal stores write whole lines and read none (Intel 64 and IA-32
   Architectures Optimization Reference Manual, "Non-Temporal Stores"; glibc's memcpy uses
   them for single copies from three quarters of the shared cache on, larger than any
   tensor). Sources are prefetched into all caches: prefetchnta, past the caches, took one
   and a half times as long on an Intel of 2023. Other processors use memcpy.

   The caller holds the GIL from the check of all addresses until the last byte is copied,
   so that no Python code can free or replace the memory in between. Threads of the C
   library share the work without the GIL. Python's functions are those of its stable
   interface, found in the running program.

   A separate pass compares a version with its base, the previous version, and sets a bit
   for each line of 64 bytes that differs (memory/lines.py). Comparing in the copying pass
   held the trainer 17 ms longer for 269 MB. */

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void *PyObject_CallNoArgs(void *callable);
extern int PyObject_IsTrue(void *object);
extern void Py_DecRef(void *object);

/* Bind symbols that glibc moved into libc in 2.32 and 2.34 to their oldest versions, so that
   a library linked with a new glibc loads with any from 2.17 on. */
#if defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__))
#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#else
#define OLDEST "GLIBC_2.17"
#endif
__asm__(".symver pthread_attr_setstacksize, pthread_attr_setstacksize@" OLDEST);
__asm__(".symver pthread_create, pthread_create@" OLDEST);
__asm__(".symver pthread_join, pthread_join@" OLDEST);
__asm__(".symver pthread_sigmask, pthread_sigmask@" OLDEST);
#endif

enum { LINE = 64, AHEAD = 1024, WORD = 64 * LINE };

#if defined(__x86_64__)
#include <immintrin.h>

#define LOOP(WIDTH, VECTOR, LOAD, STORE)                                                     \
    for (; nbytes >= 4 * LINE; nbytes -= 4 * LINE, to += 4 * LINE, from += 4 * LINE) {       \
        VECTOR held[4 * LINE / WIDTH];                                                       \
        for (int line = 0; line < 4; line++) _mm_prefetch(from + AHEAD + line * LINE, _MM_HINT_T0);  \
        for (int i = 0; i < 4 * LINE / WIDTH; i++) held[i] = LOAD((const void *)(from + i * WIDTH)); \
        for (int i = 0; i < 4 * LINE / WIDTH; i++) STORE((void *)(to + i * WIDTH), held[i]); \
    }

__attribute__((target("avx2"), optimize("O3", "unroll-loops")))
static size_t stream_avx2(char *to, const char *from, size_t nbytes) {
    const char *start = from;
    LOOP(32, __m256i, _mm256_loadu_si256, _mm256_stream_si256)
    return (size_t)(from - start);
}

__attribute__((optimize("O3", "unroll-loops")))
static size_t stream_sse2(char *to, const char *from, size_t nbytes) {
    const char *start = from;
    LOOP(16, __m128i, _mm_loadu_si128, _mm_stream_si128)
    return (size_t)(from - start);
}

static void copy(char *to, const char *from, size_t nbytes) {
    size_t head = (size_t)(-(uintptr_t)to) & (LINE - 1);
    if (head > nbytes) head = nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    size_t done = __builtin_cpu_supports("avx2") ? stream_avx2(to, from, nbytes) : stream_sse2(to, from, nbytes);
    memcpy(to + done, from + done, nbytes - done);
}

static void finish(void) { _mm_sfence(); }

/* Which of up to 64 lines differ from the base. AVX2 is no faster. */
__attribute__((optimize("O3")))
static uint64_t compare_lines(const char *run, const char *base, size_t count) {
    uint64_t bits = 0;
    for (size_t line = 0; line < count; line++, run += LINE, base += LINE) {
        __m128i different = _mm_setzero_si128();
        _mm_prefetch(run + AHEAD, _MM_HINT_T0);
        _mm_prefetch(base + AHEAD, _MM_HINT_T0);
        for (int i = 0; i < LINE; i += 16)
            different |= _mm_loadu_si128((const void *)(run + i)) ^ _mm_loadu_si128((const void *)(base + i));
        int same = _mm_movemask_epi8(_mm_cmpeq_epi8(different, _mm_setzero_si128())) == 0xffff;
        bits |= (uint64_t)!same << line;
    }
    return bits;
}

/* A bit for each byte of a line that differs. */
static uint64_t compare_bytes(const char *one, const char *other) {
    uint64_t same = 0;
    for (int i = 0; i < LINE; i += 16)
        same |= (uint64_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128((const void *)(one + i)),
                                                           _mm_loadu_si128((const void *)(other + i)))) << i;
    return ~same;
}
#else
static void copy(char *to, const char *from, size_t nbytes) { memcpy(to, from, nbytes); }
static void finish(void) {}

static uint64_t compare_lines(const char *run, const char *base, size_t count) {
    uint64_t bits = 0;
    for (size_t i = 0; i < count; i++) bits |= (uint64_t)(memcmp(run + i * LINE, base + i * LINE, LINE) != 0) << i;
    return bits;
}

static uint64_t compare_bytes(const char *one, const char *other) {
    uint64_t bits = 0;
    for (int i = 0; i < LINE; i++) bits |= (uint64_t)(one[i] != other[i]) << i;
    return bits;
}
#endif

/* The base of a run of bytes, of the same length, and a bit for each line that differs. */
typedef struct {
    const char *start, *base;
    uint64_t *lines;
} Compared;

static void compare(const Compared *with, const char *run, size_t nbytes) {
    for (size_t some; nbytes; run += some, nbytes -= some) {
        size_t at = (size_t)(run - with->start), line = at % WORD / LINE, head = -at % LINE, whole;
        const char *base = with->base + at;
        uint64_t bits = 0;
        some = WORD - at % WORD < nbytes ? WORD - at % WORD : nbytes;
        if (head > some) head = some;
        if (head) bits = (uint64_t)(memcmp(run, base, head) != 0) << line++;
        whole = (some - head) / LINE;
        if (whole) bits |= compare_lines(run + head, base + head, whole) << line;
        head += whole * LINE, line += whole;
        if (head < some) bits |= (uint64_t)(memcmp(run + head, base + head, some - head) != 0) << line;
        if (bits) __atomic_fetch_or(&with->lines[at / WORD], bits, __ATOMIC_RELAXED); /* threads share words */
    }
}

typedef struct {
    char *const *to;
    const char *const *from;
    const size_t *nbytes;
    size_t count, first, last; /* bytes, counted through all runs */
    int past_caches;
    Compared compared; /* with lines, compare from (to is NULL); without, copy it */
    int begun;
    pthread_t thread;
} Share;

static void *copy_share(void *given) {
    const Share *share = given;
    size_t at = 0;
    for (size_t i = 0; i < share->count && at < share->last; at += share->nbytes[i++]) {
        size_t begin = at < share->first ? share->first - at : 0;
        size_t end = share->last - at < share->nbytes[i] ? share->last - at : share->nbytes[i];
        if (begin >= end) continue;
        if (share->compared.lines) compare(&share->compared, share->from[i] + begin, end - begin);
        else if (share->past_caches) copy(share->to[i] + begin, share->from[i] + begin, end - begin);
        else memcpy(share->to[i] + begin, share->from[i] + begin, end - begin);
    }
    if (share->past_caches) finish();
    return NULL;
}

enum { MOST_THREADS = 16, STACK = 1 << 18 };

static void share_out(Share all, int threads) {
    Share shares[MOST_THREADS];
    size_t total = 0;
    for (size_t i = 0; i < all.count; i++) total += all.nbytes[i];
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    size_t each = total / (threads > 1 ? threads : 1) & ~(size_t)4095;
    if (!each) threads = 1;
    sigset_t every, before;
    pthread_attr_t attributes;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before); /* signals are for the program's own threads */
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    for (int i = 1; i < threads; i++) {
        shares[i] = all;
        shares[i].first = i * each, shares[i].last = i + 1 < threads ? (i + 1) * each : total;
        shares[i].begun = !pthread_create(&shares[i].thread, &attributes, copy_share, &shares[i]);
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    all.last = threads > 1 ? each : total;
    copy_share(&all);
    for (int i = 1; i < threads; i++) { /* a thread may not have started */
        if (shares[i].begun) pthread_join(shares[i].thread, NULL);
        else copy_share(&shares[i]);
    }
}

/* Copy nbytes[i] from from[i] to to[i], for each i, if check() is true; ranges must not
   overlap. Returns 1, or 0 if check() was false, or -1 if it raised. */
int replicas_copy_runs(void *check, char *const *to, const char *const *from, const size_t *nbytes, size_t count,
                       int threads, int past_caches) {
    void *answer = PyObject_CallNoArgs(check);
    int fits = answer ? PyObject_IsTrue(answer) : -1;
    if (answer) Py_DecRef(answer);
    if (fits != 1) return fits;
    share_out((Share){to, from, nbytes, count, .past_caches = past_caches}, threads);
    return 1;
}

/* Compare bytes first to last of the runs at start and base: set a bit in lines for each
   line that differs, from the lowest bit of the first word on. */
void replicas_compare(const char *start, const char *base, uint64_t *lines, size_t first, size_t last, int threads) {
    const char *const run = start + first;
    size_t nbytes = last - first;
    share_out((Share){NULL, &run, &nbytes, 1, .compared = {start, base, lines}}, threads);
}

/* Find the elements of width bytes (1, 2, 4, 8) that differ, from byte first to last,
   both multiples of width. Skips lines without a bit, unless lines is NULL. Writes the
   elements' indices, from first on, and their xors; returns their number, or most + 1 if
   there are more than most. */
size_t replicas_changed(const char *run, const char *base, const uint64_t *lines, size_t first, size_t last,
                        size_t width, uint32_t *numbers, char *xors, size_t most) {
    uint64_t every = ~0ull / (((uint64_t)1 << width) - 1); /* the first bit of each element */
    size_t found = 0;
    for (size_t word = first / WORD; word * WORD < last; word++) {
        uint64_t left = lines ? lines[word] : ~0ull;
        for (uint64_t ahead = (word + 1) * WORD >= last ? 0 : lines ? lines[word + 1] : 0; ahead; ahead &= ahead - 1) {
            size_t at = (word + 1) * WORD + (size_t)__builtin_ctzll(ahead) * LINE;
            __builtin_prefetch(run + at), __builtin_prefetch(base + at);
        }
        for (; left; left &= left - 1) {
            size_t at = word * WORD + (size_t)__builtin_ctzll(left) * LINE;
            uint64_t bits = 0;
            if (at >= first && at + LINE <= last) bits = compare_bytes(run + at, base + at);
            else
                for (size_t i = at < first ? first : at; i < at + LINE && i < last; i++)
                    bits |= (uint64_t)(run[i] != base[i]) << (i - at);
            for (size_t step = 1; step < width; step *= 2) bits |= bits >> step;
            for (bits &= every; bits; bits &= bits - 1, found++) {
                size_t here = at + (size_t)__builtin_ctzll(bits);
                if (found == most) return most + 1;
                numbers[found] = (uint32_t)((here - first) / width);
                for (size_t i = 0; i < width; i++) xors[found * width + i] = run[here + i] ^ base[here + i];
            }
        }
    }
    return found;
}

/* Reverse replicas_changed: xor each of these elements with its given xor. */
void replicas_change(char *run, size_t width, const uint32_t *numbers, const char *xors, size_t count) {
    for (size_t at = 0; at < count; at++) {
        if (at + AHEAD / LINE < count) __builtin_prefetch(run + numbers[at + AHEAD / LINE] * width, 1);
        for (size_t i = 0; i < width; i++) run[numbers[at] * width + i] ^= xors[at * width + i];
    }
}
