// What Python calls to run a whole model; see decoder.py, which packs the words.
#include "repeat.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace mainspring;

EXPORT void* mainspring_decoder_new(const int64_t* a) {
    return new Decoder(*(const DecoderOf*)a, (const LayerOf*)((const char*)a + sizeof(DecoderOf)));
}

EXPORT void mainspring_decoder_forget(void* decoder, const void*) { delete (Decoder*)decoder; }

EXPORT void mainspring_decoder_bind(void* decoder, const int64_t* a) { ((Decoder*)decoder)->bind((const CacheOf*)a); }

EXPORT void mainspring_decoder_bind_states(void* decoder, const int64_t* a) {
    ((Decoder*)decoder)->bind_states((float* const*)a);
}

EXPORT void mainspring_decoder_run(void* decoder, const int64_t* a) { ((Decoder*)decoder)->run(*(const StepOf*)a); }

// → the number of steps made.
EXPORT int64_t mainspring_decoder_repeat(void* decoder, const int64_t* a) {
    return ((Decoder*)decoder)->repeat(*(const RepeatOf*)a);
}

// → [PHASES] nanoseconds.
EXPORT const int64_t* mainspring_decoder_phases(void* decoder, const void*) { return ((Decoder*)decoder)->nanoseconds; }
