"""Invalid calls of each command, each with its error line and exit status.

Status 2: the call is invalid, and nothing was done. Status 1: it failed at run time.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import sys
from pathlib import Path

import pytest
from cli_kit import expanded

from longshore.cli.app import main

# After $ the call, then its status and its line; * stands for what differs between machines and versions.
TABLE = """
$ frobnicate
2 No such command 'frobnicate'*; see longshore --help
$ --frobnicate
2 No such option: --frobnicate*; see longshore --help
$ bench frobnicate
2 No such command 'frobnicate'*; see longshore bench --help
$ replay
2 Missing argument *; see longshore replay --help
$ replay trace.jsonl
2 expected --host and --model, or --capacity-blocks; see longshore replay --help
$ replay trace.jsonl --model llama-3.1-8b
2 expected --host and --model, or --capacity-blocks; see longshore replay --help
$ replay trace.jsonl --host 4GiB
2 --model: expected one of llama-3.1-8b, llama-3.1-70b, mistral-7b, qwen2.5-7b, qwen3-32b, deepseek-v3, or the *
$ replay gone.jsonl --capacity-blocks 5
2 cannot read trace gone.jsonl: No such file or directory
$ replay . --capacity-blocks 5
2 cannot read trace .: Is a directory
$ replay empty --capacity-blocks 5
2 empty: expected a trace, but the file is empty
$ replay binary --capacity-blocks 5
2 binary: expected a JSON object in UTF-8: Expecting value: line 1 column 1 (char 0)
$ replay half.gz --capacity-blocks 5
2 cannot read trace half.gz: Compressed file ended before the end-of-stream marker was reached
$ replay backwards.jsonl --capacity-blocks 5
2 backwards.jsonl, line 3: timestamp 500 ms is earlier than the one before, 700: sort the trace by time, or *
$ replay twice.jsonl trace.jsonl --capacity-blocks 5
2 Got unexpected extra argument(s) (trace.jsonl); see longshore replay --help
$ replay '' --capacity-blocks 5
2 cannot read trace .: Is a directory
$ replay trace.jsonl --capacity-blocks 0
2 Invalid value for '--capacity-blocks': *; see longshore replay --help
$ replay trace.jsonl --capacity-blocks -1
2 Invalid value for '--capacity-blocks': *; see longshore replay --help
$ replay trace.jsonl --capacity-blocks 1e3
2 Invalid value for '--capacity-blocks': *; see longshore replay --help
$ replay trace.jsonl --capacity-blocks 99999999999999999999
2 --capacity-blocks 99999999999999999999 needs 6938.9 EiB of memory, but only * is available: pass at most *
$ POLICY --host 4GiB
2 --capacity-blocks simulates no time: remove --host
$ POLICY --engines 3 --link 5GB/s
2 --capacity-blocks simulates no time: remove --link, --engines
$ POLICY --bench trace.jsonl
2 --capacity-blocks simulates no time: remove --bench
$ replay /dev/zero --capacity-blocks 5
2 /dev/zero: expected a JSON object in UTF-8: *
$ POLICY --through engine
2 Invalid value for '--through': expected one of 'cache', 'vllm', got 'engine'; see longshore replay --help
$ replay trace.jsonl --through cache
2 --through needs --capacity-blocks
$ POLICY --policy best
2 expected a policy out of arc, fifo, gittins, lru, lru-2, s3-fifo, got 'best'
$ POLICY --policy ''
2 expected a policy out of arc, fifo, gittins, lru, lru-2, s3-fifo, got ''
$ POLICY --block-tokens 0
2 Invalid value for '--block-tokens': *; see longshore replay --help
$ POLICY --block-tokens 7
2 trace.jsonl, line 1: expected 1080 hash ids for 7554 tokens of input in blocks of 7, got 15
$ POLICY --block-tokens 99999999999999999999999
2 trace.jsonl, line 1: expected 1 hash ids for 7554 tokens of input in blocks of 99999999999999999999999, *
$ POLICY --limit 0
2 Invalid value for '--limit': *; see longshore replay --help
$ POLICY --form runes
2 Invalid value for '--format' / '--form': *; see longshore replay --help
$ POLICY --format sessions
2 trace.jsonl, line 1: expected a field 'turns', got ['hash_ids', 'input_length', 'output_length', 'timestamp']
$ POLICY --bad-lines mend
2 Invalid value for '--bad-lines': *; see longshore replay --help
$ replay trace.jsonl --model llama-3.1-8b --host ''
2 --host: a size is a whole number of bytes, or text such as '64GiB' or '1.5TB', got ''
$ replay trace.jsonl --model llama-3.1-8b --host 0
2 --host: expected a size above zero, such as 64GiB, got '0'
$ replay trace.jsonl --model llama-3.1-8b --host -4GiB
2 --host: a size is a whole number of bytes, or text such as '64GiB' or '1.5TB', got '-4GiB'
$ replay trace.jsonl --model llama-3.1-8b --host nan
2 --host: a size is a whole number of bytes, or text such as '64GiB' or '1.5TB', got 'nan'
$ replay trace.jsonl --model llama-3.1-8b --host infGiB
2 --host: a size is a whole number of bytes, or text such as '64GiB' or '1.5TB', got 'infGiB'
$ replay trace.jsonl --model llama-3.1-8b --host 4XB
2 --host: a size is a whole number of bytes, or text such as '64GiB' or '1.5TB', got '4XB'
$ replay trace.jsonl --model llama-3.1-8b --host 1KiB
2 --host 1KiB: expected at least 64.0 MiB, one block
$ replay trace.jsonl --model llama-3.1-8b --host 64
2 --host 64: expected at least 64.0 MiB, one block; did you mean 64GiB?
$ replay trace.jsonl --model llama-3.1-8b --host 1EiB
2 host: expected at most 16.0 PiB, 268,435,456 blocks of 64.0 MiB, got 1.0 EiB
$ replay trace.jsonl --model llama-3.1-8b --host 99999999PiB
2 --host: a size is at most 1 EiB, got '99999999PiB'
$ replay trace.jsonl --model llama-3.1-8b --host 999999TiB
2 host: expected at most 16.0 PiB, 268,435,456 blocks of 64.0 MiB, got 976.6 PiB
$ REPLAY --file 1KiB
2 --file 1KiB: expected at least 64.0 MiB, one block
$ REPLAY --remote 0
2 --remote: expected a size above zero, such as 64GiB, got '0'
$ REPLAY --remote 4TiB:
2 --remote: expected SIZE, SIZE:BANDWIDTH or SIZE:BANDWIDTH:ROUNDTRIP, such as 4TiB:3GB/s:1ms, got '4TiB:'
$ REPLAY --remote 4TiB:3GB/s:1ms:7
2 --remote: expected SIZE, SIZE:BANDWIDTH or SIZE:BANDWIDTH:ROUNDTRIP, such as 4TiB:3GB/s:1ms, got '4TiB:3GB/s:1ms:7'
$ REPLAY --remote ''
2 --remote: expected SIZE, SIZE:BANDWIDTH or SIZE:BANDWIDTH:ROUNDTRIP, such as 4TiB:3GB/s:1ms, got ''
$ REPLAY --remote 4TiB:fast
2 --remote: expected a rate such as 50GB/s or 25Gbit/s, got 'fast'
$ REPLAY --remote 4TiB:3
2 --remote: expected a unit, got '3'; did you mean 3GB/s?
$ REPLAY --remote 4TiB:3GB/s:5
2 --remote: expected a time such as 500ms or 2s, got '5'
$ REPLAY --remote 4XB:3GB/s
2 --remote: a size is*
$ REPLAY --remote 4TiB:3GB/s --remote-read 2GB/s
2 --remote-read 2GB/s contradicts 3GB/s in --remote 4TiB:3GB/s: remove one of them
$ REPLAY --replicas 0
2 Invalid value for '--replicas': *; see longshore replay --help
$ REPLAY --route prefix
2 --route prefix has no effect without --replicas of at least 2
$ REPLAY --replicas 2 --route nearest
2 Invalid value for '--route': *; see longshore replay --help
$ replay trace.jsonl --capacity-blocks 5 --replicas 2
2 --capacity-blocks simulates no time: remove --replicas
$ REPLAY --engines 0
2 Invalid value for '--engines': *; see longshore replay --help
$ REPLAY --engines 99999
2 Invalid value for '--engines': *; see longshore replay --help
$ REPLAY --engines many
2 Invalid value for '--engines': *; see longshore replay --help
$ REPLAY --link 5
2 --link: expected a unit, got '5'; did you mean 5GB/s?
$ REPLAY --link 0GB/s
2 --link: expected a rate above zero, such as 50GB/s, got '0GB/s'
$ REPLAY --link 25Gb/s
2 --link: expected 25GB/s (bytes) or 25Gbit/s, got '25Gb/s'
$ REPLAY --link fast
2 --link: expected a rate such as 50GB/s or 25Gbit/s, got 'fast'
$ REPLAY --file-read -3GB/s
2 --file-read: expected a rate such as 50GB/s or 25Gbit/s, got '-3GB/s'
$ REPLAY --file-write inf
2 --file-write: expected a rate such as 50GB/s or 25Gbit/s, got 'inf'
$ REPLAY --remote-delay 5ms
2 --remote-delay 5ms has no effect without --remote
$ REPLAY --remote-read 2GB/s
2 --remote-read 2GB/s has no effect without --remote
$ REPLAY --link 0.001B/s
2 --link: expected at least one byte per second, got '0.001B/s'
$ REPLAY --remote 1TiB --remote-read 0
2 --remote-read: expected a rate above zero, such as 50GB/s, got '0'
$ REPLAY --remote 1TiB --remote-delay 5
2 --remote-delay: expected a time such as 500ms or 2s, got '5'
$ REPLAY --prefill-rate 0
2 Invalid value for '--prefill-rate': *; see longshore replay --help
$ REPLAY --prefill-rate nan
2 Invalid value for '--prefill-rate': *; see longshore replay --help
$ REPLAY --prefill-rate inf
2 Invalid value for '--prefill-rate': *; see longshore replay --help
$ REPLAY --prefill-rate 1e300
2 Invalid value for '--prefill-rate': *; see longshore replay --help
$ REPLAY --profile abacus
2 expected a profile out of h100, a100, got 'abacus'
$ replay trace.jsonl --model gpt --host 4GiB
2 expected a model, or the path of a config.json, out of llama-3.1-8b, llama-3.1-70b, mistral-7b, qwen2.5-7b, *
$ replay trace.jsonl --model '' --host 4GiB
2 expected a model, or the path of a config.json, out of llama-3.1-8b, llama-3.1-70b, mistral-7b, qwen2.5-7b, *
$ replay trace.jsonl --model config.json --host 4GiB
2 config.json: expected 'num_hidden_layers' to be an integer from 1 to 1000000000000, got 'None'
$ replay trace.jsonl --model vast.json --host 4GiB
2 vast.json: expected 'num_hidden_layers' to be an integer from 1 to 1000000000000, got '1000000000*'
$ replay trace.jsonl --model binary --host 4GiB
2 binary: expected a JSON object: 'utf-8' codec can't decode byte 0x80 in position 128: invalid start byte
$ REPLAY --bench gone.json
2 gone.json: expected what `longshore bench file, copy or prefill --json` prints: No such file or directory
$ REPLAY --bench config.json
2 config.json: expected what `longshore bench file, copy or prefill --json` prints, a JSON object with a field *
$ REPLAY --bench trace.jsonl
2 trace.jsonl: expected what `longshore bench file, copy or prefill --json` prints: Extra data: line 2 column 1 *
$ REPLAY --bench fast.json
2 fast.json: expected what `longshore bench file, copy or prefill --json` prints: each of 'cases' has a name, *
$ REPLAY --report /proc/nope
2 --report /proc/nope: No such file or directory
$ REPLAY --report empty
2 --report empty: File exists
$ replay gone.jsonl --model llama-3.1-8b --host 4GiB --report made/for/it
2 cannot read trace gone.jsonl: No such file or directory
$ REPLAY --no-such-option
2 No such option: --no-such-option*; see longshore replay --help
$ plan
2 Missing argument *; see longshore plan --help
$ plan trace.jsonl
2 --model: expected one of llama-3.1-8b, llama-3.1-70b, mistral-7b, qwen2.5-7b, qwen3-32b, deepseek-v3, or the *
$ plan gone.jsonl --model llama-3.1-8b
2 cannot read trace gone.jsonl: No such file or directory
$ replay header.csv --capacity-blocks 5
2 header.csv: expected a trace of at least one request, got none
$ replay header.csv --model llama-3.1-8b --host 4GiB
2 header.csv: expected a trace of at least one request, got none
$ replay binary --capacity-blocks 5 --format mooncake --bad-lines skip
2 binary: expected a trace of at least one request, got none
$ plan header.csv --model llama-3.1-8b
2 header.csv: expected a trace of at least one request, got none
$ PLAN --ttft-p95 500
2 --ttft-p95: expected a time such as 500ms or 2s, got '500'
$ PLAN --ttft-p95 -1s
2 --ttft-p95: expected a time such as 500ms or 2s, got '-1s'
$ PLAN --ttft-p95 nans
2 --ttft-p95: expected a time such as 500ms or 2s, got 'nans'
$ PLAN --ttft-p95 1e300s
2 --ttft-p95: expected a time such as 500ms or 2s, got '1e300s'
$ PLAN --ttft-p95 ''
2 --ttft-p95: expected a time such as 500ms or 2s, got ''
$ PLAN --prices gone.toml
2 gone.toml: expected prices in TOML: No such file or directory
$ PLAN --prices free.toml
2 free.toml: expected dram_per_gib, nvme_per_gib, store_per_gib (*) and currency, got {*'dram_per_gib': 0, *}
$ PLAN --prices deep.toml
2 deep.toml: expected prices in TOML: maximum recursion depth exceeded*
$ PLAN --prices dear.toml
2 dear.toml: expected dram_per_gib, nvme_per_gib, store_per_gib (*) and currency, got {*'dram_per_gib': 1000*}
$ PLAN --replays 0
2 Invalid value for '--replays': *; see longshore plan --help
$ PLAN --link 5
2 --link: expected a unit, got '5'; did you mean 5GB/s?
$ PLAN --engines -2
2 Invalid value for '--engines': *; see longshore plan --help
$ PLAN --engines 1000000000
2 Invalid value for '--engines': *; see longshore plan --help
$ PLAN --file-read -3
2 --file-read: expected a rate such as 50GB/s or 25Gbit/s, got '-3'
$ PLAN --file-write fast
2 --file-write: expected a rate such as 50GB/s or 25Gbit/s, got 'fast'
$ PLAN --prefill-rate inf
2 Invalid value for '--prefill-rate': *; see longshore plan --help
$ PLAN --profile abacus
2 expected a profile out of h100, a100, got 'abacus'
$ PLAN --bench gone.json
2 gone.json: expected what `longshore bench file, copy or prefill --json` prints: No such file or directory
$ PLAN --form events
2 trace.jsonl, line 1: expected an event, a JSON object whose field 'kind' is one of ordered, stored, *
$ PLAN --form prompts
2 trace.jsonl, line 1: expected a field 'prompt', got ['hash_ids', 'input_length', 'output_length', 'timestamp']
$ PLAN --form lengths
2 trace.jsonl, line 1: expected a header with a column timestamp, input_length, output_length, got *
$ PLAN --limit 0
2 Invalid value for '--limit': *; see longshore plan --help
$ PLAN --report /proc/nope
2 --report /proc/nope: No such file or directory
$ PLAN --budget 5
2 No such option: --budget*; see longshore plan --help
$ plan backwards.jsonl --model llama-3.1-8b
2 backwards.jsonl, line 3: timestamp 500 ms is earlier than the one before, 700: sort the trace by time, or *
$ plan half.gz --model llama-3.1-8b
2 cannot read trace half.gz: Compressed file ended before the end-of-stream marker was reached
$ plan twice.jsonl --model llama-3.1-8b
2 request 1: expected distinct blocks, got one twice
$ PLAN --block-tokens 512 --report empty/page
2 --report empty/page: Not a directory
$ explain
2 Missing argument *; see longshore explain --help
$ explain gone
2 gone: expected a file of events: No such file or directory
$ explain .
2 .: expected a file of events: Is a directory
$ explain binary
2 binary: expected a file of events: 'utf-8' codec can't decode byte 0x80 in position 128: invalid start byte
$ explain trace.jsonl
2 trace.jsonl, line 1: expected an event, a JSON object whose field 'kind' is one of *. A file of events is *
$ explain time.jsonl
2 time.jsonl, line 1: expected 'at' to be seconds since 1970, got 'x'. A file of events is *
$ explain endless.jsonl
2 endless.jsonl, line 1: expected 'at' to be seconds since 1970, got 'inf'. A file of events is *
$ explain named.jsonl
2 named.jsonl, line 1: expected 'tier', 'source', 'cause' and 'request' of an event to be names*
$ explain listed.jsonl
2 listed.jsonl, line 1: expected an event, a JSON object whose field 'kind' is one of *
$ explain count.jsonl --request r
2 count.jsonl, line 1: expected 'start' and 'length' of an event to be numbers of chunks*
$ explain deep.json
2 deep.json, line 1: maximum recursion depth exceeded*
$ explain empty --request r
2 no event is about a request called 'r'
$ fsck
2 Missing argument *; see longshore fsck --help
$ fsck gone
2 *gone*
$ fsck empty
2 *empty*
$ fsck .
2 *.*
$ inspect
2 Missing argument *; see longshore inspect --help
$ inspect gone
2 *gone*
$ inspect empty
2 *empty*
$ inspect .
2 *.*
$ vllm-config
2 expected --host-size, such as --host-size 64GiB
$ vllm-config --host-size large
2 host_size = 'large': a size is a whole number of bytes, or text such as '64GiB' or '1.5TB' (bytes of host *
$ vllm-config --host-size 99999999PiB
2 host_size = '99999999PiB': a size is at most 1 EiB (bytes of host memory for chunk images)
$ vllm-config --host-size 900TiB
2 host_size is 900.0 TiB, but only * of memory is free: lower it, or free memory
$ vllm-config --host-size -1GiB
2 host_size = '-1GiB': a size is a whole number of bytes, or text such as '64GiB' or '1.5TB' (bytes of host *
$ vllm-config --host-size 0
2 host_size = '0': expected a size above 0 (bytes of host memory for chunk images)
$ vllm-config --host-size 1MiB --file-size 1GiB
2 file_size is 1.0 GiB, but file_path is not set: a file tier needs both, set file_path as well
$ vllm-config --file-size 1GiB
2 file_size is 1.0 GiB, but file_path is not set: a file tier needs both, set file_path as well
$ vllm-config --host-size 1MiB --file-path kv
2 file_path is kv, but file_size is not set: a file tier needs both, set file_size as well
$ vllm-config --host-size 1MiB --file-path empty --file-size 1MiB
2 file_path is empty, but empty is not a directory
$ vllm-config --host-size 1MiB --file-path kv --file-size 900PiB
2 file_size is 900.0 PiB, but only * is free at kv: lower it, or free space
$ vllm-config --host-size 1MiB --blocks-per-chunk 0
2 blocks_per_chunk = '0': expected a whole number of at least 1 and at most 4,096 (device blocks in one chunk image)
$ vllm-config --host-size 64
2 --host-size 64: expected at least 4.0 KiB, one block; did you mean 64GiB?
$ vllm-config --host-size 1MiB --file-path kv --file-size 5
2 --file-size 5: expected at least 4.0 KiB, one block; did you mean 5GiB?
$ vllm-config --host-size 1MiB --file-path '' --file-size 1MiB
2 file_path = '': expected a path, got an empty one (directory of the file tier; unset: no file tier)
$ vllm-config --host-size 1MiB --set blocks_per_chunk=2 --blocks-per-chunk 4
2 --set blocks_per_chunk=2: already set by --blocks-per-chunk 4
$ vllm-config --host-size 1MiB --set file_threads=999
2 file_threads = '999': expected a whole number of at least 1 and at most 256 (threads of the file tier, *
$ vllm-config --host-size 1MiB --set prefill_speed=inf
2 prefill_speed = 'inf': expected a finite number of at least 0 (prompt tokens computed per second, *
$ vllm-config --host-size 1MiB --set gate
2 --set gate: expected KEY=VALUE, as in --set offload=write_back
$ vllm-config --host-size 1MiB --set control=a/b
2 control: expected a name without slashes, or an absolute path, got 'a/b'
$ sglang-config --file-path kv --file-size 1MiB --set control=a/b
2 control: expected a name without slashes, or an absolute path, got 'a/b'
$ vllm-config --host-size 1MiB --file-path /proc/x --file-size 1MiB
2 file_path is /proc/x, but the file system there holds no files: name a directory on a disk
$ vllm-config --host-size 1MiB --set =on
2 --set =on: expected KEY=VALUE, as in --set offload=write_back
$ vllm-config --host-size 1MiB --set gates=on
2 'gates' is not a setting; did you mean 'gate'?
$ vllm-config --host-size 1MiB --set gate=perhaps
2 gate = 'perhaps': expected true or false (recompute blocks when that is faster *
$ vllm-config --host-size 1MiB --set load_timeout=nan
2 load_timeout = 'nan': expected a finite number above 0 and at most 86,400 (seconds after which a load *
$ vllm-config --host-size 1MiB --set host_size=2MiB
2 --set host_size=2MiB: already set by --host-size 1MiB
$ vllm-config --host-size 1MiB --set prefetch=timeout
2 'prefetch' has no effect in vLLM: lookups wait for at most load_timeout
$ vllm-config --host-size 1MiB --set offload=write_back
2 offload = 'write_back' is not served under vLLM, which offers blocks when they are complete, not when it *
$ demo --set offload
2 --set offload: expected KEY=VALUE, as in --set offload=write_back
$ demo --set of_load=write_back
2 'of_load' is not a setting; did you mean 'offload'?
$ demo --config gone.toml
2 gone.toml: No such file or directory
$ demo --config binary
2 binary: 'utf-8' codec can't decode byte 0x80 in position 128: invalid start byte
$ demo --model gone
2 --model gone: expected a directory with a config.json
$ demo --device abacus
2 Invalid value for '--device': *; see longshore demo --help
$ demo --device-share 0
2 Invalid value for '--device-share': *; see longshore demo --help
$ demo --host-share 2
2 Invalid value for '--host-share': *; see longshore demo --help
$ demo --requests 0
2 Invalid value for '--requests': *; see longshore demo --help
$ demo --block-tokens 1
2 Invalid value for '--block-tokens': *; see longshore demo --help
$ demo --block-tokens 99999999999
2 Invalid value for '--block-tokens': *; see longshore demo --help
$ demo --max-new-tokens 1
2 Invalid value for '--max-new-tokens': *; see longshore demo --help
$ demo --max-new-tokens 99999999999
2 Invalid value for '--max-new-tokens': *; see longshore demo --help
$ demo --workload gone.jsonl
2 --workload gone.jsonl: no such file
$ demo --workload binary
2 binary, line 1: expected a JSON object in UTF-8: Expecting value: line 1 column 1 (char 0)
$ demo --workload empty
2 expected a trace of at least one request, got none
$ demo --dir /proc/nope
2 --dir /proc/nope: No such file or directory
$ demo --report /proc/nope
2 --report /proc/nope: No such file or directory
$ demo --requests 2 --device-share 0.01
2 the longest request needs 15 blocks, but 1% of the working set of 24 blocks is only 0: raise --device-share to 0.63
$ demo --requests 1
2 the longest request needs 15 blocks, but 25% of the working set of 14 blocks is only 3: raise --requests
$ demo --requests 2 --set host_size=900TiB
2 the longest request needs 15 blocks, but 25% of the working set of 24 blocks is only 6: raise --device-share to 0.63
$ demo --requests 8 --set host_size=1
2 host_size is 1 B, but one chunk image of this model needs 384.0 KiB: raise it, or lower blocks_per_chunk
$ demo --requests 8 --set file_size=1KiB
2 file_size is 1.0 KiB, but one chunk image of this model needs 524.0 KiB: raise it, or lower blocks_per_chunk
$ gc
2 Missing argument *; see longshore gc --help
$ gc gone
2 gone does not exist: expected the directory of a file tier
$ gc empty
2 empty is not a directory: expected the directory of a file tier
$ gc . --remove 12
2 --remove 12: expected at least 8 hexadecimal digits of a scope
$ gc . --older-than 5
2 --older-than 5: expected a number of days or hours, such as 30d or 12h
$ bench plan --repeats 0
2 Invalid value for '--repeats': *; see longshore bench plan --help
$ bench plan --case nothing
2 no case nothing; there are *
$ bench copy --bytes 99999GiB
2 --bytes 99999GiB needs 293.0 TiB of memory, but only * is available: pass at most --bytes *
$ bench copy --bytes 99999999PiB
2 --bytes: a size is at most 1 EiB, got '99999999PiB'
$ bench copy --bytes 0
2 --bytes: expected a size above zero, such as 64GiB, got '0'
$ bench copy --bytes -1GiB
2 --bytes: a size is a whole number of bytes, or text such as '64GiB' or '1.5TB', got '-1GiB'
$ bench copy --bytes 1KiB
2 expected at least 33554432 bytes to move, got 1024
$ bench copy --bytes lots
2 --bytes: a size is a whole number of bytes, or text such as '64GiB' or '1.5TB', got 'lots'
$ bench copy --repeats 0
2 Invalid value for '--repeats': *; see longshore bench copy --help
$ bench copy --device cuda
2 --device cuda and --calibrate: set both or neither; `make gpu` measures the copies of a GPU
$ bench copy --calibrate
2 --device cuda and --calibrate: set both or neither; `make gpu` measures the copies of a GPU
$ bench copy --device tpu
2 Invalid value for '--device': *; see longshore bench copy --help
$ bench copy --case nothing
2 no case nothing; there are *
$ bench copy --bytes 1MiB --case offload/2MiB
2 expected at least 33554432 bytes to move, got 1048576
$ bench file
2 Missing option *; see longshore bench file --help
$ bench file --dir /proc/nope
2 --dir /proc/nope: No such file or directory
$ bench file --dir empty
2 --dir empty: Not a directory
$ bench file --dir gone
2 --dir gone: No such file or directory
$ bench vllm --model gone --dir gone
2 --dir gone: No such file or directory
$ demo --dir gone
2 --dir gone: No such file or directory
$ bench file --dir . --bytes 99999GiB
2 --bytes 99999GiB needs 97.7 TiB of memory, but only * is available: pass at most --bytes *
$ bench file --dir . --bytes ''
2 --bytes: a size is a whole number of bytes, or text such as '64GiB' or '1.5TB', got ''
$ bench file --dir . --case nothing --allow-ram-disk
2 no case nothing; there are *
$ bench file --dir . --bytes 1KiB --allow-ram-disk --allow-page-cache
2 expected at least 524288 bytes to move, two images, got 1024
$ bench prefill
2 Missing option *; see longshore bench prefill --help
$ bench prefill --model gone
2 expected a model, or the path of a config.json, out of llama-3.1-8b, llama-3.1-70b, mistral-7b, qwen2.5-7b, *
$ bench prefill --model config.json
2 config.json: expected 'num_hidden_layers' to be an integer from 1 to 1000000000000, got 'None'
$ bench prefill --model llama.json --tokens 0
2 --tokens: expected comma-separated whole numbers of at least 1, such as 512,2048; got '0'
$ bench prefill --model llama.json --tokens 99999999999
2 --model llama.json --tokens 99999999999 needs 116.4 TiB of memory, but only * is available: pass at most --model *
$ bench prefill --model llama.json --tokens 1,,2
2 --tokens: expected comma-separated whole numbers of at least 1, such as 512,2048; got '1,,2'
$ bench prefill --model llama.json --tokens 1e3
2 --tokens: expected comma-separated whole numbers of at least 1, such as 512,2048; got '1e3'
$ bench prefill --model huge.json
2 --model huge.json --tokens 2048 needs 145.8 PiB of memory, but only * is available: this machine is too small
$ bench cache --blocks 0
2 --blocks: expected comma-separated whole numbers of at least 64, such as 512,2048; got '0'
$ bench cache --blocks 8
2 --blocks: expected comma-separated whole numbers of at least 64, such as 512,2048; got '8'
$ bench cache --blocks -64
2 --blocks: expected comma-separated whole numbers of at least 64, such as 512,2048; got '-64'
$ bench cache --blocks 99999999999
2 --blocks 99999999999 needs 186.3 TiB of memory, but only * is available: pass at most --blocks *
$ bench cache --blocks nan
2 --blocks: expected comma-separated whole numbers of at least 64, such as 512,2048; got 'nan'
$ bench cache --blocks 64 --case nothing
2 no case nothing; there are *
$ bench sglang --model gone --flags '"'
2 --flags ": expected flags as in a shell: No closing quotation
$ bench sglang --model gone --hicache-flags "'"
2 --hicache-flags ': expected flags as in a shell: No closing quotation
$ doctor --image 900TiB file:///tmp
2 --image 900TiB needs 28.1 PiB of memory, but only * is available: pass at most --image *
$ bench vllm
2 Missing option *; see longshore bench vllm --help
$ bench vllm --model gone
2 vLLM is not installed beside Longshore: run this with the Python that runs vLLM
$ bench vllm --model gone --engine {
2 expected arguments of vllm.LLM as JSON, got '{': Expecting property name enclosed in double quotes: line 1 *
$ bench vllm --model gone --engine []
2 expected arguments of vllm.LLM as a JSON object, got '[]'
$ bench vllm --model gone --host-size lots
2 host_size = 'lots': a size is a whole number of bytes, or text such as '64GiB' or '1.5TB' (bytes of host memory *
$ bench vllm --model gone --file-size 99999999PiB
2 file_size = '99999999PiB': a size is at most 1 EiB (bytes on disk for the file tier)
$ bench vllm --model gone --dir /proc/nope
2 --dir /proc/nope: No such file or directory
$ bench vllm --model gone --sessions 0
2 Invalid value for '--sessions': *; see longshore bench vllm --help
$ bench vllm --model gone --trace gone.jsonl
2 vLLM is not installed beside Longshore: run this with the Python that runs vLLM
$ bench vllm --model gone --prompt 99999999999999999999
2 Invalid value for '--prompt': *; see longshore bench vllm --help
"""

CALLS = [
    pytest.param(call, int(told[0]), told[2:], id=call)
    for call, told in zip(*(iter(TABLE.strip().splitlines()),) * 2, strict=True)
]


@pytest.mark.parametrize(("call", "status", "line"), CALLS)
def test_an_invalid_call_is_refused_in_one_line(
    call: str, status: int, line: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in files.iterdir())
    monkeypatch.setattr("sys.argv", ["longshore", *shlex.split(expanded(call).removeprefix("$ "))])
    with pytest.raises(SystemExit) as left:
        main()
    told = capsys.readouterr()
    *notes, last = told.err.splitlines()
    assert (left.value.code, told.out) == (status, "")
    assert fnmatch.fnmatchcase(last, re.sub(r"[\[\]?]", "?", f"longshore: {line}")), last
    assert len(notes) <= 2
    assert "Input should be" not in last
    assert "internal error" not in last
    assert sorted(path.name for path in files.iterdir()) == before


def test_the_table_has_more_than_150_calls() -> None:
    assert len(CALLS) > 150


def test_prefill_without_torch_says_what_to_install(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "longshore.bench.prefills", raising=False)
    monkeypatch.delattr("longshore.bench.prefills", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("sys.argv", ["longshore", "bench", "prefill", "--model", "llama.json"])
    with pytest.raises(SystemExit) as left:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 1
    assert line.endswith("bench prefill needs an extra: in a clone of Longshore, pip install '.[transformers]'")
