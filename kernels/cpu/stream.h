/* Stores that go past the caches, for outputs too large to be found there again: the line is not read first. */
#ifndef SHOAL_STREAM_H
#define SHOAL_STREAM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef SHOAL_STREAM_BYTES
#define SHOAL_STREAM_BYTES (32u << 20) /* all arrays of a call together: more than the caches keep */
#endif

#if defined(__SSE2__)
#include <emmintrin.h>

static inline int streams(size_t bytes) { return bytes >= SHOAL_STREAM_BYTES; }

/* Copy without allocating cache lines for `to`; `stream_end` makes it visible before what is stored later. */
static inline void stream(void *to, const void *from, size_t bytes) {
    char *out = to;
    const char *in = from;
    size_t head = (size_t)(-(uintptr_t)out & 15);
    head = head < bytes ? head : bytes;
    memcpy(out, in, head);
    size_t whole = (bytes - head) / 16;
    for (size_t i = 0; i < whole; i++)
        _mm_stream_si128((__m128i *)(void *)(out + head) + i,
                         _mm_loadu_si128((const __m128i *)(const void *)(in + head) + i));
    size_t done = head + 16 * whole;
    memcpy(out + done, in + done, bytes - done);
}

static inline void stream_end(void) { _mm_sfence(); }
#else
static inline int streams(size_t bytes) { return (void)bytes, 0; }
static inline void stream(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
static inline void stream_end(void) {}
#endif

#endif
