// What Python calls for recurrent scans; see native_scans.py, which packs the words.
#include "mixer.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace mainspring;

EXPORT void mainspring_convolve(const int64_t* a) { convolve(*(const ConvCall*)a); }
EXPORT void mainspring_gated_delta(const int64_t* a) { gated_delta(*(const DeltaCall*)a); }
EXPORT void mainspring_mamba(const int64_t* a) { mamba(*(const MambaCall*)a); }

EXPORT void mainspring_mix(const int64_t* a) {
    const MixCall& call = *(const MixCall*)a;
    run_team(int(call.sequences.threads), [&](Team& team, int rank) { mix_in_team(call, team, rank); });
}
