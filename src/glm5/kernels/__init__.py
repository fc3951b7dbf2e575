"""The operators: each once as a plain-PyTorch specification, and fast versions beside it.

Legend of shape suffixes used throughout the package:

    B batch · T queries (new tokens) · S keys (cached + new tokens) · H attention heads · K selected positions
    D model width · C latent width (kv_lora_rank) · R rotary width · N non-rotary head width · V value head width
    J index heads · I index head width · E experts · F expert width · M routed experts per token

Visibility. A query sees a contiguous run of key slots, `first_BT <= s <= last_BT`, both inclusive; an empty
run (`first > last`) is a padding query, whose outputs are zero. Causality, left padding, packed documents,
chunked prefill, cached decode and draft verification are all such intervals, so no mask tensor is ever made.

Selection. `selected_BTK` holds int32 key slots, sorted ascending, padded at the end with -1.
"""
