/* Copies with non-temporal stores, which bypass the CPU caches.

   An ordinary store reads its cache line from memory before it fills it. For weights,
   which are larger than any cache, that is a third of all traffic, and evicts everything
   else. Non-temporal stores write whole lines and read none (Intel 64 and IA-32
   Architectures Optimization Reference Manual, "Non-Temporal Stores"; glibc's memcpy uses
   them for single copies from three quarters of the shared cache on, larger than any
   tensor). Other processors: memcpy. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

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

/* Copy nbytes[i] from from[i] to to[i], for each i; no ranges may overlap. */
void replicas_copy(char *const *to, const char *const *from, const size_t *nbytes, size_t count) {
    for (size_t i = 0; i < count; i++) memcpy(to[i], from[i], nbytes[i]);
}

/* The same, past the caches. Other threads see all of it on return. */
void replicas_stream(char *const *to, const char *const *from, const size_t *nbytes, size_t count) {
    for (size_t i = 0; i < count; i++) copy(to[i], from[i], nbytes[i]);
    finish();
}
