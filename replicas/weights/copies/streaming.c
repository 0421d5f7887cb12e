/* Copies with non-temporal stores, which bypass the CPU caches.

   An ordinary store reads its cache line from memory before it fills it. For weights,
   which are larger than any cache, that is a third of all traffic, and evicts everything
   else. Non-temporal stores write whole lines and read none (Intel 64 and IA-32
   Architectures Optimization Reference Manual, "Non-Temporal Stores"; glibc's memcpy uses
   them for single copies from three quarters of the shared cache on, larger than any
   tensor). Other processors: memcpy.

   The caller holds the GIL from the check of all addresses until the last byte is copied:
   no Python code can free or replace the memory in between. Threads of the C library
   share the work; they need no GIL. Python's functions are those of its stable interface,
   found in the running program. */

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void *PyObject_CallNoArgs(void *callable);
extern int PyObject_IsTrue(void *object);
extern void Py_DecRef(void *object);

#if defined(__x86_64__)
#include <immintrin.h>

enum { LINE = 64, AHEAD = 1024 };

#define LOOP(WIDTH, VECTOR, LOAD, STORE)                                                     \
    for (; nbytes >= 4 * LINE; nbytes -= 4 * LINE, to += 4 * LINE, from += 4 * LINE) {       \
        VECTOR held[4 * LINE / WIDTH];                                                       \
        for (int line = 0; line < 4; line++) _mm_prefetch(from + AHEAD + line * LINE, _MM_HINT_NTA); \
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
#else
static void copy(char *to, const char *from, size_t nbytes) { memcpy(to, from, nbytes); }
static void finish(void) {}
#endif

typedef struct {
    char *const *to;
    const char *const *from;
    const size_t *nbytes;
    size_t count, first, last; /* bytes of all runs, one behind the other */
    int past_caches, begun;
    pthread_t thread;
} Share;

static void *copy_share(void *given) {
    const Share *share = given;
    size_t at = 0;
    for (size_t i = 0; i < share->count && at < share->last; at += share->nbytes[i++]) {
        size_t begin = at < share->first ? share->first - at : 0;
        size_t end = share->last - at < share->nbytes[i] ? share->last - at : share->nbytes[i];
        if (begin >= end) continue;
        if (share->past_caches) copy(share->to[i] + begin, share->from[i] + begin, end - begin);
        else memcpy(share->to[i] + begin, share->from[i] + begin, end - begin);
    }
    if (share->past_caches) finish();
    return NULL;
}

enum { MOST_THREADS = 16, STACK = 1 << 18 };

/* Copy nbytes[i] from from[i] to to[i], for each i, if check() is true; no ranges may
   overlap. Returns 1; 0: it was false; -1: it has raised. */
int replicas_checked_copy(void *check, char *const *to, const char *const *from, const size_t *nbytes, size_t count,
                  int threads, int past_caches) {
    void *answer = PyObject_CallNoArgs(check);
    int fits = answer ? PyObject_IsTrue(answer) : -1;
    if (answer) Py_DecRef(answer);
    if (fits != 1) return fits;

    Share shares[MOST_THREADS];
    size_t total = 0;
    for (size_t i = 0; i < count; i++) total += nbytes[i];
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    size_t each = total / (threads > 1 ? threads : 1) & ~(size_t)4095;
    if (!each) threads = 1;
    sigset_t all, before;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    for (int i = 1; i < threads; i++) {
        size_t last = i + 1 < threads ? (i + 1) * each : total;
        shares[i] = (Share){to, from, nbytes, count, i * each, last, past_caches, 0, 0};
        shares[i].begun = !pthread_create(&shares[i].thread, &attributes, copy_share, &shares[i]);
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    shares[0] = (Share){to, from, nbytes, count, 0, threads > 1 ? each : total, past_caches, 1, 0};
    copy_share(&shares[0]);
    for (int i = 1; i < threads; i++) { /* a limit of threads may refuse one */
        if (shares[i].begun) pthread_join(shares[i].thread, NULL);
        else copy_share(&shares[i]);
    }
    return 1;
}
