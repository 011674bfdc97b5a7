# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import time

import pytest
from ops.redact import LEAST_KEY, is_secret, masked, printable, without_colours, without_key, without_key_start

HIDDEN = "(hidden: it may hold a secret)"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("SGLANG_API_KEY=s3cr3t", f"SGLANG_API_KEY {HIDDEN}"),
        ("Authorization: Bearer s3cr3t", f"Authorization {HIDDEN}"),
        ("sent Bearer s3cr3t", f"sent Bearer {HIDDEN}"),
        ("HF_TOKEN=s3cr3t invalid", f"HF_TOKEN {HIDDEN}"),
        ("ApiKey s3cr3t refused", f"ApiKey {HIDDEN}"),
        ("API key s3cr3t", f"API key {HIDDEN}"),
        ("--api_key s3cr3t", f"--api_key {HIDDEN}"),
        ("{'x-api_Key': 's3cr3t', 'a': 1}", "{'x-api_Key': ***, 'a': 1}"),
        ('{"password": "s3\\"cr3t", "b": 2}', '{"password": ***, "b": 2}'),
        ("password='s3cr3t", f"password {HIDDEN}"),
        ("DB_PASS=s3cr3t", f"DB_PASS {HIDDEN}"),
        ("SGLANG_PWD: s3cr3t", f"SGLANG_PWD {HIDDEN}"),
        ("AWS_SECRET_ACCESS_KEY=s3cr3t", f"AWS_SECRET_ACCESS_KEY {HIDDEN}"),
        ("PIN_SECRET=1234 x", "PIN_SECRET=*** x"),
        ("headers={'a': 's3cr3t'}", f"headers {HIDDEN}"),
        ("MC_REDIS_URL=redis://s3cr3t", f"MC_REDIS_URL {HIDDEN}"),
        ("GET redis://user:s3cr3t@host/0 x", "GET redis://***@host/0 x"),
        ("GET redis://:s3/cr3t@s3cr3t@host x", "GET redis://***@host x"),
        ("http://127.0.0.1:30001/v1", "http://127.0.0.1:30001/v1"),
        ("ServerArgs(api_keys='s3cr3t')", f"ServerArgs {HIDDEN}"),
        ("key sk-s3cr3t", f"key sk- {HIDDEN}"),
        ("#new-token: 6, #cached-token: 0, token usage: 0.1", "#new-token: 6, #cached-token: 0, token usage: 0.1"),
        ("max_total_num_tokens=8192, tokenizer=x", "max_total_num_tokens=8192, tokenizer=x"),
        ("KeyError: 'a.b'", "KeyError: 'a.b'"),
        ("no attribute 'api_key'", "no attribute 'api_key'"),
        ("api_key=None, x", "api_key=None, x"),
    ],
)
def test_secrets_in_a_text(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("SGLANG_API_KEY", "1", True),
        ("HF_TOKEN", "hf_x", True),
        ("HF_TOKENS", "hf_x", True),
        ("HF_TOKEN_FILE", "/x", True),
        ("TOKEN_KEY", "1", True),
        ("SGLANG_AUTH", "x", True),
        ("SGLANG_DB_PASS", "1", True),
        ("NCCL_PASSWD", "x", True),
        ("SGLANG_PWD", "x", True),
        ("MC_REDIS_URL", "x", True),
        ("SGLANG_BEARER", "x", True),
        ("SGLANG_TRACE_HEADERS", "x", True),
        ("SGLANG_MAX_NEW_TOKENS_LIMIT", "131072", False),
        ("max_total_tokens", 8192, False),
        ("max_total_tokens", None, False),
        ("tokenizer_path", "/x", False),
        ("SGLANG_DIAG_BYPASS_HEALTH_GENERATE", "1", False),
    ],
)
def test_names_of_secrets(name: str, value: object, secret: bool) -> None:
    assert is_secret(name, value) == secret


def test_colours_and_control_characters() -> None:
    assert without_colours("\x1b[2m\x1b[31mERROR\x1b[0m x\x1b]0;title\x07y") == "ERROR xy"
    assert printable("a\nb\x1bc\u200bd", 99) == "a\\nb\\x1bc\\u200bd"
    assert printable("深度 🙂", 4) == "深度 🙂"
    assert len(printable("\n" * 500, 400)) == 400


@pytest.mark.parametrize("word", ["token", "token=1 ", "'token': '", "x://y:", "\x1b]", "auth_", "_url", "pass"])
def test_a_long_text_takes_no_time(word: str) -> None:
    start = time.process_time()
    masked(without_colours(word * 50_000))
    assert time.process_time() - start < 5.0


@pytest.mark.parametrize(
    ("key", "text", "shown"),
    [
        ("k" * LEAST_KEY, "x" + "k" * LEAST_KEY + "y", "x***y"),
        ('a"long-key-of-many', '{"key": "a\\"long-key-of-many"} a"long-key-of-many', '{"key": "***"} ***'),
        ("Paris", "Paris, not Parisian: 'Paris'.", "***, not Parisian: '***'."),
        ("4", "2+2=4, 44 and 4.5", "2+2=***, 44 and ***.5"),
        ("s3cr3t", "Bearer s3cr3t", "Bearer ***"),
        ('a"b', '{"key": "a\\"b"}', '{"key": "***"}'),
        ("a+b(c", "a+b(c", "***"),
        ("sk-long/key-of-many", "sk-long\\/key-of-many", "***"),
        ("sk-long/key-of-many", "a " + "".join(f"\\u{ord(one):04X}" for one in "sk-long/key-of-many"), "a ***"),
        ("sk-long-key-of-many", "".join(f"\\\\u{ord(one):04x}" for one in "sk-long-key-of-many"), "***"),
        ("sk-long-key-of-many", "sk\\u002dlong-key\\u002Dof-many\\n", "***\\n"),
    ],
)
def test_a_key_is_taken_out_of_a_text(key: str, text: str, shown: str) -> None:
    assert without_key(text, key) == shown


KEY = "sk-long-key-of-many"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("bad key sk-long-key-of-man", "bad key ***"),
        ("bad key sk-l", "bad key ***"),
        ("bad key sk-", "bad key sk-"),
        ("bad key sk\\u002dlong-k\\u00", "bad key ***"),
        ("bad key \\u0073\\u006b\\u002d\\u006c", "bad key ***"),
        ("sk-long key", "sk-long key"),
        ("", ""),
    ],
)
def test_the_beginning_of_a_key_at_the_end_of_a_cut_text(text: str, shown: str) -> None:
    assert without_key_start(text, KEY) == shown


@pytest.mark.parametrize("key", [KEY, '"' * 20, "\\u0061" * 5])
def test_a_key_is_looked_for_in_no_time(key: str) -> None:
    start = time.process_time()
    for text in ("\\" * 1_000_000, key[:10] * 100_000):
        without_key_start(without_key(text, key), key)
    assert time.process_time() - start < 5.0
