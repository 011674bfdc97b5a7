# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask a model questions with checkable answers, and report every fault under a stable id.

Each question is one row `prompt.<id>`. What must hold for any answer has rows of its own (`answer.<fault>`), so that a
report says at once which kind of fault there is. A model's questions and expected answers are data of the model.
"""

from __future__ import annotations

import json
import math
import shlex
import time
import typing as t
from dataclasses import dataclass, field

from .answers import check_expectation, find_loop, find_marker, is_empty, judge
from .http import Client, HttpError, curl_command
from .openai import CHAT_PATH, ChatAnswer, chat, served_models
from .report import Row, rounded, skipped_row

SEEN_CHARS = 300
PROFILES = ("quick", "full", "capacity")

# Every fault of an answer: its id, what must hold, and what a failure most often means.
FAULTS: dict[str, tuple[str, str]] = {
    "request": (
        "the server answers in time and to the protocol",
        "the server refused, broke off, did not answer, or sent what the protocol does not know",
    ),
    "expected": ("the answer is the expected one", "the model computes wrong values: kernel, weights or chat template"),
    "non_empty": ("the answer has content", "reasoning or tool parser took all of it, or the first token was the end"),
    "finish_reason": ("the answer ended by itself", "the end token is not recognised, or max_tokens is too small"),
    "usage": ("the server counts its tokens", "the server or a proxy in front drops usage, or counts wrong"),
    "loop": ("the answer does not repeat itself", "the model is in a loop: kernel, quantisation or chat template"),
    "markers": ("no control token in the content", "chat template, reasoning parser or tool parser does not fit"),
    "reasoning": ("reasoning is separated as wanted", "reasoning parser missing, or thinking switched the other way"),
    "same_when_streamed": ("streamed and whole answer are the same", "the streaming parser drops or adds text"),
    "stream": (
        "a stream brings its tokens as they are made",
        "the server does not stream, a proxy holds the stream back, or the engine stalls between steps",
    ),
    "first_token": ("the first token comes in time", "the server is busy, or compiles kernels while serving"),
    "model": ("the answers name the asked model", "a proxy or router sends the questions to another model"),
    "tool_loop": (
        "tool calls end in an answer",
        "the model does not see the tool's result: chat template or tool parser",
    ),
    "prompt_size": ("the prompt has the wanted size", "the text was cut, or its tokens are counted in another way"),
    "crossed": ("every request gets its own answer", "the server mixes up requests that run at the same time"),
}
MODEL_ROW = "server.model"
# What SGLang says has ended an answer, when a token was none of the vocabulary.
NAN_STOP = "NaN happened"
FINISH_REASONS = ("stop", "tool_calls", "length")
MODELS_TIMEOUT_S = 10.0
# By how much the counts of one prompt may differ: a template adds some tokens.
MISCOUNT_TOKENS = 8
# So many tokens of an answer do not come in one event, whatever speculation or a slow reader puts together.
ONE_PIECE_TOKENS = 16
# A parser may make two events of the token at which reasoning ends.
MORE_CHUNKS = 2


# Streamed or not, in the order of asking.
MODES: dict[str, tuple[bool, ...]] = {"both": (False, True), "only": (True,), "never": (False,)}


def needed(tries: int, min_pass_rate: float) -> int:
    """How many of so many tries must pass."""
    return max(1, math.ceil(tries * min_pass_rate - 1e-9))


@dataclass(frozen=True)
class PromptCheck:
    """One question. extra holds further fields of the request, such as response_format or tools.

    tries and min_pass_rate: the question is asked until ceil(tries x min_pass_rate) tries have passed, or can no longer
    pass. stream is both, only or never. reasoning is any, required or forbidden. finish_reason is the only accepted
    one; the tokens of an answer that must end at max_tokens (length) are counted, too. max_ttft_s is the longest time
    to the first token of a stream, max_gap_s the longest silence after it. profile is the smallest profile in which
    the question is asked.
    """

    id: str
    messages: tuple[dict[str, t.Any], ...]
    expect: dict[str, t.Any]
    max_tokens: int = 64
    temperature: float = 0.0
    stream: str = "both"
    timeout: float = 60.0
    tries: int = 1
    min_pass_rate: float = 1.0
    allow_length: bool = False
    reasoning: str = "any"
    same_when_streamed: bool = True
    max_ttft_s: float | None = None
    max_gap_s: float | None = None
    finish_reason: str | None = None
    extra: dict[str, t.Any] = field(default_factory=dict)
    profile: str = "quick"

    def payload(self, model: str) -> dict[str, t.Any]:
        return {
            "model": model,
            "messages": list(self.messages),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            **self.extra,
        }

    def question(self) -> str:
        return " ".join(str(message.get("content", "")) for message in self.messages)

    def needed(self) -> int:
        return needed(self.tries, self.min_pass_rate)

    def modes(self) -> tuple[bool, ...]:
        return MODES[self.stream]


def check_problem(check: PromptCheck) -> str | None:
    """Why a check is not usable, or None."""
    if not check.messages:
        return f"check {check.id!r} has neither prompt nor messages"
    if check.tries < 1:
        return f"check {check.id!r}: tries is {check.tries}, wanted at least 1"
    if not 0 < check.min_pass_rate <= 1:
        return f"check {check.id!r}: min_pass_rate is {check.min_pass_rate}, wanted above 0 and at most 1"
    if check.max_tokens < 1:
        return f"check {check.id!r}: max_tokens is {check.max_tokens}, wanted at least 1"
    limits = {"timeout": check.timeout, "max_ttft_s": check.max_ttft_s, "max_gap_s": check.max_gap_s}
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            return f"check {check.id!r}: {name} is {limit}, wanted more than 0"
    for message in check.messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            return f"check {check.id!r}: a message is {message!r}, wanted a mapping with role and content"
    for name, value, known in (("stream", check.stream, tuple(MODES)), ("profile", check.profile, PROFILES)):
        if value not in known:
            return f"check {check.id!r}: {name} is {value!r}, known are {', '.join(known)}"
    if check.finish_reason not in (None, *FINISH_REASONS):
        return f"check {check.id!r}: finish_reason is {check.finish_reason!r}, known are {', '.join(FINISH_REASONS)}"
    if check.reasoning not in ("any", "required", "forbidden"):
        return f"check {check.id!r}: reasoning is {check.reasoning!r}, known are any, required, forbidden"
    problem = check_expectation(check.expect)
    return f"check {check.id!r}: expect: {problem}" if problem else None


@dataclass(frozen=True)
class Fault:
    """One thing wrong with an answer. mode is whole, streamed or both; kind is the HttpError's for a failed request."""

    id: str
    mode: str
    reason: str
    kind: str = ""

    @property
    def unanswered(self) -> bool:
        return self.kind in ("connect", "timeout")


@dataclass(frozen=True)
class Try:
    """One asking of a question, in each of its modes."""

    faults: tuple[Fault, ...]
    answers: tuple[tuple[str, ChatAnswer], ...]
    elapsed_s: float

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def unanswered(self) -> bool:
        return any(fault.unanswered for fault in self.faults)

    def as_dict(self) -> dict[str, t.Any]:
        return {
            "ok": self.ok,
            "elapsed_s": round(self.elapsed_s, 3),
            "faults": [{"id": fault.id, "mode": fault.mode, "reason": fault.reason} for fault in self.faults],
            "answers": [
                {
                    "mode": mode,
                    "text": answer.text[:SEEN_CHARS],
                    "reasoning": answer.reasoning[:SEEN_CHARS],
                    "tool_calls": [{**call, "arguments": call["arguments"][:SEEN_CHARS]} for call in answer.tool_calls],
                    "finish_reason": answer.finish_reason,
                    "usage": answer.usage,
                    "ttft_s": rounded(answer.ttft_s),
                    "gap_s": rounded(answer.gap_s),
                    "total_s": rounded(answer.total_s),
                    "chunks": answer.chunks,
                }
                for mode, answer in self.answers
            ],
        }


def faults_of(check: PromptCheck, mode: str, answer: ChatAnswer, model: str) -> list[Fault]:
    """Every fault of one answer of a model."""
    found: list[Fault] = []

    def fault(id: str, reason: str) -> None:
        found.append(Fault(id, mode, reason[:SEEN_CHARS]))

    unasked = bool(answer.tool_calls) and "tools" not in check.extra
    if is_empty(answer.text) and not answer.tool_calls:
        aside = f"; {len(answer.reasoning)} characters went into reasoning" if answer.reasoning else ""
        fault("non_empty", f"the content is empty{aside}")
    verdict = judge(check.expect, answer.text, check.question(), answer.tool_calls)
    if not verdict.ok:
        fault("expected", verdict.reason)
    elif unasked:
        fault("expected", f"a tool was called, {answer.tool_calls[0]['name']!r}, and none was offered")
    elif answer.tool_calls and (not all(answer.call_ids) or len(set(answer.call_ids)) < len(answer.call_ids)):
        fault("expected", f"the ids of the tool calls are {list(answer.call_ids)}, wanted one of its own for each")
    finish_problem = _finish_problem(answer, check)
    if finish_problem:
        fault("finish_reason", finish_problem)
    if model and answer.model not in (None, model):
        fault("model", f"the answer names the model {answer.model!r}, asked was {model!r}")
    usage_problem = _usage_problem(answer, check)
    if usage_problem:
        fault("usage", usage_problem)
    texts = [("content", answer.text), ("reasoning", answer.reasoning)]
    texts += [("tool call", str(call.get("arguments", ""))) for call in answer.tool_calls]
    for where, text in texts:
        unit = find_loop(text)
        if unit:
            fault("loop", f"the {where} repeats {unit[:60]!r}")
    marker = find_marker(answer.text)
    if marker:
        fault("markers", f"the content holds {marker!r}")
    if check.reasoning == "required" and is_empty(answer.reasoning):
        fault("reasoning", "there is no reasoning beside the content")
    if check.reasoning == "forbidden" and not is_empty(answer.reasoning):
        fault("reasoning", f"there are {len(answer.reasoning)} characters of reasoning")
    said = token_count(answer.usage, "completion_tokens") or 0
    if mode == mode_name(True) and answer.chunks == 1 and said >= ONE_PIECE_TOKENS and not answer.tool_calls:
        fault("stream", f"{said} tokens came in one piece after {answer.total_s:.2f} s")
    if check.max_gap_s is not None and answer.gap_s is not None and answer.gap_s > check.max_gap_s:
        fault("stream", f"the stream was silent for {answer.gap_s:.2f} s, wanted at most {check.max_gap_s:g} s")
    if check.max_ttft_s is not None and answer.ttft_s is not None and answer.ttft_s > check.max_ttft_s:
        fault("first_token", f"the first token took {answer.ttft_s:.2f} s, wanted at most {check.max_ttft_s:g} s")
    return found


def _finish_problem(answer: ChatAnswer, check: PromptCheck) -> str:
    """Why an answer can't have ended as it says, or an empty string."""
    reason = answer.finish_reason
    allowed = FINISH_REASONS if check.allow_length else FINISH_REASONS[:2]
    allowed = (check.finish_reason,) if check.finish_reason else allowed
    if reason not in allowed:
        return f"finish_reason is {reason!r}, wanted {' or '.join(allowed)}"
    if reason == "tool_calls" and not answer.tool_calls:
        return "finish_reason is 'tool_calls' and there is no call"
    if reason == "stop" and answer.tool_calls and check.extra.get("tool_choice", "auto") == "auto":
        return "finish_reason is 'stop' beside a tool call, wanted tool_calls"
    limit, said = _limit(check), token_count(answer.usage, "completion_tokens") or 0
    # The end token may be the last one that is allowed.
    if reason == "stop" and limit and said > limit:
        return f"finish_reason is 'stop' after {said} tokens, max_tokens was {limit}"
    return "the engine met NaN instead of a token and ended the answer" if answer.matched_stop == NAN_STOP else ""


def _limit(check: PromptCheck) -> int | None:
    """The max_tokens of a request."""
    limit = check.extra.get("max_tokens", check.max_tokens)
    return limit if isinstance(limit, int) else None


def _usage_problem(answer: ChatAnswer, check: PromptCheck) -> str:
    """Why the token counts can't be true, or an empty string."""
    usage = answer.usage
    if not isinstance(usage, dict):
        return "the answer has no usage"
    counts = {key: token_count(usage, key) for key in ("prompt_tokens", "completion_tokens")}
    wrong = [f"{key}={str(usage.get(key))[:40]}" for key, value in counts.items() if value is None or value < 1]
    if wrong:
        return f"usage has {', '.join(wrong)}, wanted at least 1"
    limit, said, asked = _limit(check), counts["completion_tokens"] or 0, counts["prompt_tokens"] or 0
    if limit and (said > limit + MISCOUNT_TOKENS or (check.finish_reason == "length" and abs(said - limit) > 1)):
        return f"usage has completion_tokens={said}, max_tokens was {limit}"
    if not answer.tool_calls and answer.chunks > said + MORE_CHUNKS:
        return f"usage has completion_tokens={said}, the stream had {answer.chunks} pieces"
    # No tokenizer puts words together over a space.
    words = len(check.question().split())
    return f"usage has prompt_tokens={asked}, the prompt has {words} words" if asked < words else ""


def token_count(usage: t.Mapping[str, t.Any] | None, key: str) -> int | None:
    """A count of the server, None when it is none."""
    value = (usage or {}).get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Target:
    """Whom to ask, and until when: deadline is a reading of time.monotonic()."""

    client: Client
    model: str
    key_file: str | None = None
    deadline: float = math.inf

    def left(self, timeout: float) -> float:
        """The time limit of a request that begins now."""
        return min(timeout, max(0.1, self.deadline - time.monotonic()))

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.deadline


def ask_once(target: Target, check: PromptCheck) -> Try:
    start = time.monotonic()
    faults: list[Fault] = []
    answers: list[tuple[str, ChatAnswer]] = []
    for streamed in check.modes():
        mode = mode_name(streamed)
        try:
            answer = chat(target.client, check.payload(target.model), streamed, target.left(check.timeout))
        except HttpError as error:
            faults.append(Fault("request", mode, str(error), error.kind))
            if faults[-1].unanswered:
                break
            continue
        answers.append((mode, answer))
        faults.extend(faults_of(check, mode, answer, target.model))
    if check.same_when_streamed and len(answers) == 2:
        difference = stream_difference(answers[0][1], answers[1][1])
        if difference:
            faults.append(Fault("same_when_streamed", "both", difference))
    if len(answers) == 2:
        counts = [token_count(answer.usage, "prompt_tokens") or 0 for _mode, answer in answers]
        if all(counts) and max(counts) - min(counts) > max(MISCOUNT_TOKENS, 0.05 * max(counts)):
            reason = f"usage has prompt_tokens={counts[0]} for the whole answer and {counts[1]} for the streamed one"
            faults.append(Fault("usage", "both", reason))
    return Try(tuple(faults), tuple(answers), time.monotonic() - start)


def mode_name(streamed: bool) -> str:
    return "streamed" if streamed else "whole"


def stream_difference(whole: ChatAnswer, streamed: ChatAnswer) -> str:
    for name in ("text", "reasoning", "tool_calls"):
        one, other = getattr(whole, name), getattr(streamed, name)
        if one != other:
            return f"{name} differs: whole {str(one)[:80]!r}, streamed {str(other)[:80]!r}"
    return ""


def repeat(once: t.Callable[[], Try], tries: int, min_pass_rate: float, over: t.Callable[[], bool]) -> list[Try]:
    """Try until the outcome is certain or the time is over. Every try is kept."""
    wanted = needed(tries, min_pass_rate)
    done: list[Try] = []
    while len(done) < tries:
        done.append(once())
        passed = sum(one.ok for one in done)
        if passed >= wanted or passed + tries - len(done) < wanted or over():
            break
    return done


def prompt_row(target: Target, check: PromptCheck) -> Row:
    tries = repeat(lambda: ask_once(target, check), check.tries, check.min_pass_rate, lambda: target.over)
    shown = shown_try(tries, check.needed())
    return tries_row(
        f"prompt.{check.id}",
        tries,
        check.needed(),
        wanted=wanted_words(check.expect),
        next_command=next_command(target, check.payload(target.model), shown),
        evidence=bounds(check),
    )


def bounds(check: PromptCheck) -> dict[str, t.Any]:
    """What was asked, what was wanted, and the times that a question is held to; what was measured is in its tries."""
    limits = {"timeout_s": check.timeout, "max_ttft_s": check.max_ttft_s, "max_gap_s": check.max_gap_s}
    held = {name: limit for name, limit in limits.items() if limit is not None}
    return {"question": check.question()[:SEEN_CHARS], "expected": wanted_words(check.expect), **held}


def shown_try(tries: t.Sequence[Try], wanted: int) -> Try:
    """The try that the row shows: the first wrong one of a failed check, else the last."""
    if sum(one.ok for one in tries) >= wanted:
        return tries[-1]
    return next((one for one in tries if not one.ok), tries[-1])


def tries_row(
    id: str,
    tries: t.Sequence[Try],
    needed_passes: int,
    wanted: str,
    next_command: str,
    evidence: dict[str, t.Any] | None = None,
) -> Row:
    """The row of a check that consists of tries."""
    passed = sum(one.ok for one in tries)
    ok = passed >= needed_passes
    shown = shown_try(tries, needed_passes)
    ttfts = [answer.ttft_s for one in tries for mode, answer in one.answers if answer.ttft_s is not None]
    return Row(
        id=id,
        ok=ok,
        wanted=wanted,
        seen=_seen(shown),
        elapsed_s=sum(one.elapsed_s for one in tries),
        ttft_s=max(ttfts) if ttfts else None,
        cause="" if ok else _cause(shown),
        next_command="" if ok else next_command,
        passed=passed,
        tried=len(tries),
        tries=tuple(tries),
        unanswered=tries[-1].unanswered,
        evidence=evidence or {},
    )


def wanted_words(expect: t.Mapping[str, t.Any]) -> str:
    kind = expect["kind"]
    return kind if kind == "non_empty" else f"{kind}: {expect['value']}"


def _seen(one: Try) -> str:
    if one.answers:
        bad = {fault.mode for fault in one.faults}
        answer = next((answer for mode, answer in one.answers if mode in bad), one.answers[0][1])
        return (answer.text or json.dumps(list(answer.tool_calls)))[:SEEN_CHARS]
    return one.faults[0].reason if one.faults else ""


def _cause(one: Try) -> str:
    if not one.faults:
        return "too few tries passed before the time was over"
    first = one.faults[0]
    also = sorted({fault.id for fault in one.faults} - {first.id})
    text = f"{first.reason} ({first.mode}); likely: {FAULTS[first.id][1]}"
    return f"{text}; also: {', '.join(also)}" if also else text


def next_command(target: Target, payload: t.Mapping[str, t.Any], shown: Try) -> str:
    if any(fault.kind == "connect" for fault in shown.faults):
        return "systemctl status 'sglang-*'"
    return chat_command(target.client.base_url, payload, target.key_file)


def chat_command(base_url: str, payload: t.Mapping[str, t.Any], key_file: str | None = None) -> str:
    """A question as a command to run by hand."""
    body = json.dumps(payload, ensure_ascii=False)
    if len(body) > 1500:
        return "journalctl -u 'sglang-*' -n 100 --no-pager"
    words = ("-H 'Content-Type: application/json'", "-d", shlex.quote(body))
    return curl_command(f"{base_url}{CHAT_PATH}", key_file, *words)


def model_row(target: Target) -> Row:
    """The server lists the wanted model. SGLang repeats whatever name a request gives, so answers do not tell."""
    start = time.monotonic()
    try:
        served = served_models(target.client, target.left(MODELS_TIMEOUT_S))
    except HttpError as error:
        seen, cause = "nothing", str(error)
        evidence: dict[str, t.Any] = {"timeout_s": MODELS_TIMEOUT_S, "status": error.status}
    else:
        seen = ", ".join(served)[:SEEN_CHARS] or "no model"
        cause = "" if target.model in served else "another model or another server listens here"
        evidence = {"timeout_s": MODELS_TIMEOUT_S, "status": 200, "served": list(served)[:20]}
    elapsed = time.monotonic() - start
    return Row(
        id=MODEL_ROW,
        ok=not cause,
        wanted=target.model,
        seen=seen,
        elapsed_s=elapsed,
        cause=cause,
        next_command=curl_command(f"{target.client.base_url}/v1/models", target.key_file) if cause else "",
        passed=int(not cause),
        tried=1,
        evidence=evidence,
    )


def fault_rows(rows: t.Sequence[Row]) -> list[Row]:
    """One row for each kind of fault. It fails when the fault made a question fail; what a pass rate tolerated is
    counted in passed/tried, never hidden. Without any answer only the requests can be judged."""
    result = []
    answered = any(one.answers for row in rows for one in row.tries)
    # They have no request of their own: the longest time limit is that of the questions.
    limit = max((row.evidence.get("timeout_s", 0.0) for row in rows), default=0.0)
    for id, (wanted, cause) in FAULTS.items():
        hits = [(row, fault) for row in rows for one in row.tries for fault in one.faults if fault.id == id]
        if not hits and not answered and (id != "request" or not rows):
            why, evidence = "no question was answered", {"timeout_s": limit, "tries": 0}
            result.append(skipped_row(f"answer.{id}", wanted, why, evidence=evidence))
            continue
        bad = [(row, fault) for row, fault in hits if not row.ok]
        tried = sum(row.tried for row in rows)
        seen = "; ".join(f"{row.id} ({fault.mode}): {fault.reason}" for row, fault in (bad or hits)[:3])
        touched = sum(any(fault.id == id for fault in one.faults) for row in rows for one in row.tries)
        result.append(
            Row(
                id=f"answer.{id}",
                ok=not bad,
                wanted=wanted,
                seen=seen or f"{tried} tries without",
                elapsed_s=0.0,
                cause=cause if bad else "",
                next_command=bad[0][0].next_command if bad else "",
                passed=tried - touched,
                tried=tried,
                evidence={
                    "timeout_s": limit,
                    "tries": tried,
                    "faulty_tries": touched,
                    "rows": sorted({row.id for row, _fault in hits}),
                },
            )
        )
    return result
