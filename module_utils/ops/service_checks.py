# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks of a service that take more than one question: conversations with tools, long prompts, many clients at once,
clients that leave, and what the server reports about itself.

Each check is a dataclass with an id, a profile and run(), which returns one Row. What belongs to a model (questions,
expected answers, sizes) is data of the model; see docs/smoke.md.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import threading
import time
import typing as t
from dataclasses import dataclass, field, replace

from .answers import check_expectation, judge
from .engine_load import COUNTERS, LOADS_PATH, METRICS_PATH, VERIFY_STEPS, read_counters, read_load, watch
from .http import Client, HttpError, curl_command, fields_command, parse_json
from .needle import MAX_NEEDLES, Needle, haystack, needles
from .openai import CHAT_PATH, ChatAnswer, chat
from .probe import Capacity
from .prompt_checks import (
    MODES,
    SEEN_CHARS,
    Fault,
    PromptCheck,
    Target,
    Try,
    ask_once,
    check_problem,
    faults_of,
    mode_name,
    needed,
    next_command,
    repeat,
    shown_try,
    stream_difference,
    token_count,
    tries_row,
    wanted_words,
)
from .report import Row, skipped_row

# After the profile's time a look at the counters still gets so many seconds.
LAST_LOOK_S = 2.0
# Nor does one last longer than so many seconds.
COUNTERS_S = 10.0
# Bad request, content too large, unprocessable: the statuses that tell a client that its prompt is the problem.
REFUSALS = (400, 413, 422)
# A sentence of a long text has more words than this; a server that counts fewer tokens does not count.
MIN_SENTENCE_TOKENS = 4
# No prompt is made for a longer context, in tokens.
MAX_CONTEXT = 2**24
JOURNAL = "journalctl -u 'sglang-*' -n 100 --no-pager"


@dataclass(frozen=True)
class Scene:
    """What a check works on. engine is where /metrics and /v1/loads are; the same as target's unless a router stands
    in front. resting_tokens and counters are the readings before the first question, None where there was none; unread
    says why, by the path."""

    target: Target
    engine: Client
    capacity: Capacity
    resting_tokens: int | None = None
    counters: dict[str, float] | None = None
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def longest(self) -> int | None:
        """The longest request in tokens: what the model and the KV pool both allow."""
        known = [size for size in (self.capacity.context_length, self.capacity.max_total_num_tokens) if size]
        return min(known) if known else None


# Conversations with tools


@dataclass(frozen=True)
class ToolCheck:
    """A question, the expected call, its result, and the answer that uses the result; whole and streamed.

    The model may call max_calls times; max_tokens limits every single answer. extra goes into every request,
    first_extra (such as tool_choice) into the first only.
    """

    id: str
    prompt: str
    tools: tuple[dict[str, t.Any], ...]
    call: dict[str, t.Any]
    result: str
    expect: dict[str, t.Any]
    max_calls: int = 2
    max_tokens: int = 512
    temperature: float = 0.0
    stream: str = "both"
    timeout: float = 60.0
    tries: int = 1
    min_pass_rate: float = 1.0
    same_when_streamed: bool = True
    extra: dict[str, t.Any] = field(default_factory=dict)
    first_extra: dict[str, t.Any] = field(default_factory=dict)
    profile: str = "full"

    def problem(self) -> str | None:
        if self.max_calls < 1:
            return f"check {self.id!r}: max_calls is {self.max_calls}, wanted at least 1"
        if not all(isinstance(tool, dict) for tool in self.tools):
            return f"check {self.id!r}: tools is {list(self.tools)!r}, wanted a list of mappings"
        wrong = check_expectation({"kind": "tool_call", "value": self.call})
        if wrong:
            return f"check {self.id!r}: call: {wrong}"
        return check_problem(self._turn([{"role": "user", "content": self.prompt}], 1))

    def run(self, scene: Scene) -> Row:
        target = scene.target
        tries = repeat(lambda: self.once(target), self.tries, self.min_pass_rate, lambda: target.over)
        passes = needed(self.tries, self.min_pass_rate)
        first = self._turn([{"role": "user", "content": self.prompt}], 0).payload(target.model)
        return tries_row(
            f"tool.{self.id}",
            tries,
            passes,
            wanted=f"a call of {self.call['name']}, then {wanted_words(self.expect)}",
            next_command=next_command(target, first, shown_try(tries, passes)),
            evidence={
                "question": self.prompt[:SEEN_CHARS],
                "call": dict(self.call),
                "result": self.result[:SEEN_CHARS],
                "expected": wanted_words(self.expect),
                "timeout_s": self.timeout,
            },
        )

    def once(self, target: Target) -> Try:
        start = time.monotonic()
        faults: list[Fault] = []
        answers: list[tuple[str, ChatAnswer]] = []
        first: list[ChatAnswer] = []
        for streamed in MODES[self.stream]:
            said, wrong = self._talk(target, streamed)
            answers += [(mode_name(streamed), answer) for answer in said]
            faults += wrong
            first += said[:1]
            if any(fault.unanswered for fault in wrong):
                break
        if self.same_when_streamed and len(first) == 2:
            difference = stream_difference(first[0], first[1])
            if difference:
                faults.append(Fault("same_when_streamed", "both", difference))
        return Try(tuple(faults), tuple(answers), time.monotonic() - start)

    def _turn(self, messages: t.Sequence[dict[str, t.Any]], calls: int) -> PromptCheck:
        """The request after so many calls, with what its answer must be."""
        expect = self.expect if calls else {"kind": "tool_call", "value": self.call}
        extra = {"tools": list(self.tools), **self.extra, **({} if calls else self.first_extra)}
        return PromptCheck(
            self.id,
            tuple(messages),
            expect,
            self.max_tokens,
            self.temperature,
            self.stream,
            self.timeout,
            self.tries,
            self.min_pass_rate,
            extra=extra,
            profile=self.profile,
        )

    def _talk(self, target: Target, streamed: bool) -> tuple[list[ChatAnswer], list[Fault]]:
        mode = mode_name(streamed)
        messages: list[dict[str, t.Any]] = [{"role": "user", "content": self.prompt}]
        said: list[ChatAnswer] = []
        for calls in range(self.max_calls + 1):
            turn = self._turn(messages, calls)
            try:
                answer = chat(target.client, turn.payload(target.model), streamed, target.left(self.timeout))
            except HttpError as error:
                return said, [Fault("request", mode, str(error), error.kind)]
            said.append(answer)
            if calls and answer.tool_calls:
                turn = replace(turn, expect={"kind": "tool_call", "value": self.call})
            faults = faults_of(turn, mode, answer, target.model)
            if faults or not answer.tool_calls:
                return said, faults
            messages += self._exchange(answer, calls)
        reason = f"the tool was called {len(said)} times, wanted at most {self.max_calls} calls and then an answer"
        return said, [Fault("tool_loop", mode, reason)]

    def _exchange(self, answer: ChatAnswer, number: int) -> list[dict[str, t.Any]]:
        """The model's call and the tool's result, as the messages of the next request."""
        call_id = f"call_{number}"
        call = {"id": call_id, "type": "function", "function": dict(answer.tool_calls[0])}
        said: dict[str, t.Any] = {"role": "assistant", "content": answer.text, "tool_calls": [call]}
        if answer.reasoning:
            said["reasoning_content"] = answer.reasoning
        return [said, {"role": "tool", "tool_call_id": call_id, "content": self.result}]


# Long prompts


@dataclass(frozen=True)
class NeedleCheck:
    """Facts hidden in a long text, asked for one by one.

    The length is tokens, or share_of_limit of the longest request that the server can hold. All questions share the
    text, so the server computes it once. seed fixes text and facts; without one every run has others, which no prefix
    cache knows. The seed of a run is in its evidence.
    """

    id: str
    tokens: int = 0
    share_of_limit: float = 0.0
    needles: int = 3
    seed: int | None = None
    max_tokens: int = 32
    timeout: float = 120.0
    min_pass_rate: float = 1.0
    extra: dict[str, t.Any] = field(default_factory=dict)
    profile: str = "full"

    def problem(self) -> str | None:
        where = f"check {self.id!r}:"
        if (self.tokens > 0) == (self.share_of_limit > 0) or self.tokens < 0:
            return f"{where} tokens is {self.tokens}, share_of_limit is {self.share_of_limit}, wanted one of them"
        if not 0 <= self.share_of_limit <= 0.99:
            return f"{where} share_of_limit is {self.share_of_limit}, wanted at most 0.99"
        if not 1 <= self.needles <= MAX_NEEDLES:
            return f"{where} needles is {self.needles}, wanted 1 to {MAX_NEEDLES}"
        return check_problem(self._question("", Needle("", 0, 0)))

    def run(self, scene: Scene) -> Row:
        start = time.monotonic()
        id, wanted = f"needle.{self.id}", f"{self.needles} hidden facts in {self._size_words()}"
        longest = scene.longest
        if self.share_of_limit and not longest:
            url, names = f"{scene.engine.base_url}/server_info", ("max_total_num_tokens", "context_length")
            command = fields_command(url, scene.target.key_file, names)
            cause, evidence = "the server does not report its limit", {"timeout_s": self.timeout, "wanted_tokens": None}
            return Row(id, False, wanted, "no limit", 0.0, cause=cause, next_command=command, evidence=evidence)
        size = self.tokens or int(self.share_of_limit * (longest or 0))
        if longest and size + self.max_tokens > longest:
            evidence = {"timeout_s": self.timeout, "wanted_tokens": size, "longest_tokens": longest}
            why = f"the longest request of this server is {longest} tokens"
            return skipped_row(id, wanted, why, evidence=evidence)
        seed = self.seed if self.seed is not None else time.time_ns() % 1_000_000
        hidden = needles(self.needles, seed)
        try:
            sentences = self._sentences(scene.target, size, seed)
            fault = Fault("usage", "whole", "the server does not count the tokens of a prompt")
        except HttpError as error:
            sentences, fault = None, Fault("request", "whole", str(error), error.kind)
        if sentences is None:
            tries = [Try((fault,), (), time.monotonic() - start)]
            return self._row(scene, id, wanted, tries, {"timeout_s": self.timeout, "seed": seed, "wanted_tokens": size})
        text = haystack(sentences, hidden, seed)
        tries = []
        for needle in hidden:
            others = [one.value for one in hidden if one is not needle]
            tries.append(self._sized(ask_once(scene.target, self._question(text, needle, others)), size))
            if tries[-1].unanswered or scene.target.over:
                break
        seen = [(answer.usage or {}).get("prompt_tokens") for one in tries for _mode, answer in one.answers]
        evidence = {
            "timeout_s": self.timeout,
            "seed": seed,
            "wanted_tokens": size,
            "prompt_tokens": seen,
            "depths": [one.depth for one in hidden],
        }
        return self._row(scene, id, wanted, tries, evidence)

    def _size_words(self) -> str:
        return f"{self.tokens} tokens" if self.tokens else f"{self.share_of_limit:.0%} of the longest request"

    def _question(self, text: str, needle: Needle, others: t.Sequence[int] = ()) -> PromptCheck:
        """The question for one fact; another one in the answer makes it wrong."""
        message = {"role": "user", "content": f"{text}\n\n{needle.question()}"}
        return PromptCheck(
            self.id,
            (message,),
            {"kind": "integer", "value": needle.value, "reject": list(others)},
            self.max_tokens,
            stream="never",
            timeout=self.timeout,
            min_pass_rate=self.min_pass_rate,
            extra=self.extra,
            profile=self.profile,
        )

    def _sentences(self, target: Target, size: int, seed: int) -> int | None:
        """How many sentences make a prompt of that size, by the server's own count for two short texts.

        None when the server does not count.
        """
        few, many = 10, 60
        lengths = [self._count(target, haystack(count, (), seed)) for count in (few, many)]
        each = (lengths[1] - lengths[0]) / (many - few)
        if each < MIN_SENTENCE_TOKENS:
            return None
        fixed = lengths[0] - few * each + self.needles * each
        margin = 1.02 if self.tokens else 1.0
        return max(1, math.ceil((size * margin - fixed) / each))

    def _count(self, target: Target, text: str) -> int:
        check = replace(self._question(text, Needle("lighthouse", 0, 0)), max_tokens=1)
        usage = chat(target.client, check.payload(target.model), timeout=target.left(self.timeout)).usage
        return token_count(usage, "prompt_tokens") or 0

    def _sized(self, one: Try, size: int) -> Try:
        """The try, with a fault when the server counted a shorter prompt than wanted."""
        for mode, answer in one.answers:
            count = token_count(answer.usage, "prompt_tokens")
            if count and 0 < count < 0.97 * size:
                reason = f"the prompt has {count} tokens, wanted {size}"
                return replace(one, faults=(*one.faults, Fault("prompt_size", mode, reason)))
        return one

    def _row(self, scene: Scene, id: str, wanted: str, tries: list[Try], evidence: dict[str, t.Any]) -> Row:
        passes = needed(self.needles, self.min_pass_rate)
        shown = shown_try(tries, passes)
        return tries_row(
            id, tries, passes, wanted, next_command(scene.target, {"messages": "x" * 2000}, shown), evidence
        )


# Many clients at once


@dataclass(frozen=True)
class ConcurrentCheck:
    """Questions with different answers, all asked at the same moment; every second one streamed.

    cases hold prompt and expect. rounds repeats the whole, min_pass_rate is over all answers.
    """

    id: str
    cases: tuple[dict[str, t.Any], ...]
    rounds: int = 1
    max_tokens: int = 64
    temperature: float = 0.0
    timeout: float = 60.0
    min_pass_rate: float = 1.0
    extra: dict[str, t.Any] = field(default_factory=dict)
    profile: str = "full"

    def problem(self) -> str | None:
        if len(self.cases) < 2 or self.rounds < 1:
            return f"check {self.id!r}: {len(self.cases)} cases and {self.rounds} rounds, wanted at least 2 and 1"
        for case in self.cases:
            if not isinstance(case, dict) or not isinstance(case.get("prompt", ""), str):
                return f"check {self.id!r}: a case is {case!r}, wanted a mapping with a prompt as text"
            if not isinstance(case.get("expect", {}), dict):
                return f"check {self.id!r}: expect is {case['expect']!r}, wanted a mapping"
            if set(case) != {"prompt", "expect"}:
                return f"check {self.id!r}: a case has {', '.join(sorted(case))}, wanted prompt and expect"
        wanted = [json.dumps(case["expect"], sort_keys=True) for case in self.cases]
        if len(set(wanted)) < len(wanted):
            return f"check {self.id!r}: two cases have the same expected answer, so a mix-up could not be seen"
        return next(filter(None, (check_problem(check) for check in self.questions())), None)

    def questions(self) -> list[PromptCheck]:
        return [
            PromptCheck(
                self.id,
                ({"role": "user", "content": case["prompt"]},),
                case["expect"],
                self.max_tokens,
                self.temperature,
                "only" if index % 2 else "never",
                self.timeout,
                min_pass_rate=self.min_pass_rate,
                extra=self.extra,
                profile=self.profile,
            )
            for index, case in enumerate(self.cases)
        ]

    def run(self, scene: Scene) -> Row:
        tries: list[Try] = []
        wall = 0.0
        for _round in range(self.rounds):
            start = time.monotonic()
            tries += self._round(scene.target)
            wall += time.monotonic() - start
            if scene.target.over:
                break
        total = len(self.cases) * self.rounds
        passes = needed(total, self.min_pass_rate)
        shown = shown_try(tries, passes)
        payload = self.questions()[tries.index(shown) % len(self.cases)].payload(scene.target.model)
        overlap = sum(one.elapsed_s for one in tries) / wall if wall else 0.0
        row = tries_row(
            f"concurrent.{self.id}",
            tries,
            passes,
            wanted=f"{total} right answers to {len(self.cases)} clients at once",
            next_command=next_command(scene.target, payload, shown),
            evidence={
                "timeout_s": self.timeout,
                "clients": len(self.cases),
                "questions": [
                    {"question": case["prompt"][:SEEN_CHARS], "expected": wanted_words(case["expect"])}
                    for case in self.cases
                ],
                "wall_s": round(wall, 3),
                "overlap": round(overlap, 2),
            },
        )
        seen = f"{row.passed} of {row.tried} right" + ("" if row.ok else f"; {row.seen}")
        return replace(row, seen=seen, elapsed_s=wall)

    def _round(self, target: Target) -> list[Try]:
        questions = self.questions()
        gate = threading.Barrier(len(questions), timeout=self.timeout)

        def client(index: int) -> Try:
            gate.wait()
            return self._judged(ask_once(target, questions[index]), index)

        # A client that breaks raises here: its question has no verdict, so the check has none.
        with concurrent.futures.ThreadPoolExecutor(len(questions)) as pool:
            return list(pool.map(client, range(len(questions))))

    def _judged(self, one: Try, index: int) -> Try:
        """The try, with a fault when a wrong answer is the right one of another client."""
        if all(fault.id != "expected" for fault in one.faults):
            return one
        for mode, answer in one.answers:
            for other, case in enumerate(self.cases):
                if other != index and judge(case["expect"], answer.text, case["prompt"], answer.tool_calls).ok:
                    reason = f"this is the answer to {case['prompt']!r}, which another client asked"
                    return replace(one, faults=(*one.faults, Fault("crossed", mode, reason)))
        return one


# Limits


@dataclass(frozen=True)
class OverLongCheck:
    """A prompt longer than the model's context must be refused at once, as the client's mistake."""

    max_s: float = 10.0
    profile: str = "quick"
    id: str = "limits.over_long"

    def problem(self) -> str | None:
        return None if self.max_s > 0 else f"over_long: max_s is {self.max_s}, wanted more than 0"

    def run(self, scene: Scene) -> Row:
        wanted = f"status {', '.join(map(str, REFUSALS))} within {self.max_s:g} s"
        context = scene.capacity.context_length
        if not context or context > MAX_CONTEXT:
            command = curl_command(f"{scene.target.client.base_url}/v1/models", scene.target.key_file)
            return Row(
                self.id,
                False,
                wanted,
                "no limit",
                0.0,
                cause=f"the server reports {context} tokens as its limit, wanted at most {MAX_CONTEXT}"
                if context
                else "the server does not report its limit",
                next_command=command,
                evidence={"timeout_s": self.max_s, "context_length": context},
            )
        payload = {
            "model": scene.target.model,
            "messages": [{"role": "user", "content": "a " * math.ceil(1.2 * context)}],
            "max_tokens": 1,
        }
        start = time.monotonic()
        try:
            answer = chat(scene.target.client, payload, timeout=scene.target.left(self.max_s))
        except HttpError as error:
            elapsed = time.monotonic() - start
            refused = error.status in REFUSALS
            cause = (
                ""
                if refused
                else f"{error}; likely: the length is checked too late, or the request was lost on its way"
            )
            unanswered, seen, status = error.kind in ("connect", "timeout"), str(error), error.status
        else:
            elapsed, unanswered, status = time.monotonic() - start, False, 200
            count = (answer.usage or {}).get("prompt_tokens")
            seen = f"an answer; the server counted {count} prompt tokens"
            cause = "the prompt was cut instead of refused: allow-auto-truncate, or a proxy that shortens"
        return Row(
            self.id,
            not cause,
            wanted,
            seen,
            elapsed,
            cause=cause,
            next_command=JOURNAL if cause else "",
            passed=int(not cause),
            tried=1,
            unanswered=unanswered,
            evidence={
                "timeout_s": self.max_s,
                "context_length": context,
                "status": status,
                "words": math.ceil(1.2 * context),
            },
        )


# What the server reports about itself


@dataclass(frozen=True)
class CancelCheck:
    """A client that leaves in the middle of a long answer must give its KV slots back.

    The slots are looked at in /v1/loads. The check needs a moment without other requests, at most settle_s seconds of
    waiting; a server that stays busy can't be judged. window_s is the time that the release may take.
    """

    window_s: float = 10.0
    settle_s: float = 5.0
    max_tokens: int = 1000
    timeout: float = 60.0
    profile: str = "full"
    id: str = "kv.cancelled_client"

    def problem(self) -> str | None:
        low = min(self.window_s, self.settle_s, self.timeout, self.max_tokens)
        return None if low > 0 else f"cancelled_client: a limit is {low}, wanted more than 0"

    def run(self, scene: Scene) -> Row:
        start = time.monotonic()
        wanted = f"its KV slots are free within {self.window_s:g} s"
        try:
            return self._run(scene, start, wanted)
        except HttpError as error:
            cause = f"{error}; likely: the server does not answer, or has no {LOADS_PATH}"
            command = curl_command(f"{scene.engine.base_url}{LOADS_PATH}", scene.target.key_file)
            return self._row(start, wanted, "no answer", cause, {}, command, error.kind in ("connect", "timeout"))

    def _run(self, scene: Scene, start: float, wanted: str) -> Row:
        quiet = watch(scene.engine, lambda load: not load.busy, scene.target.left(self.settle_s))
        if not quiet.held:
            why = f"the server is busy with other requests: {quiet.last.words()}"
            return skipped_row(self.id, wanted, why, elapsed_s=time.monotonic() - start, evidence=self._limits())
        resting = quiet.last.used_tokens
        payload = {
            "model": scene.target.model,
            "messages": [{"role": "user", "content": "Count from one to a thousand in words."}],
            "max_tokens": self.max_tokens if scene.longest is None else min(self.max_tokens, scene.longest // 2),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        with contextlib.closing(
            scene.target.client.post_sse(CHAT_PATH, payload, scene.target.left(self.timeout))
        ) as events:
            begun = sum(1 for _event, _number in zip(filter(_carries_text, events), range(3)))
            if not begun:
                why = "the answer ended before its client could leave"
                return skipped_row(self.id, wanted, why, elapsed_s=time.monotonic() - start, evidence=self._limits())
            if begun < 3:
                cause = "it was not streamed: the server or a proxy holds the answer back until its end"
                seen = f"an answer of {payload['max_tokens']} tokens that came in {begun} pieces"
                return self._row(start, wanted, seen, cause, {}, JOURNAL)
            held = watch(scene.engine, lambda load: load.used_tokens > resting, scene.target.left(self.settle_s))
        freed = watch(scene.engine, lambda load: load.used_tokens <= resting, scene.target.left(self.window_s))
        evidence = {"resting_tokens": resting, "while_running": held.as_list(), "after_leaving": freed.as_list()}
        command = curl_command(f"{scene.engine.base_url}{LOADS_PATH}", scene.target.key_file)
        if not held.held:
            cause = f"{LOADS_PATH} never showed the running request: its report is stale, or belongs to another engine"
            return self._row(start, wanted, held.last.words(), cause, evidence, command)
        took = freed.samples[-1][0]
        if not freed.held:
            cause = "the server goes on with a request that nobody waits for: the abort was lost, or a proxy hides it"
            return self._row(start, wanted, f"after {took:.1f} s {freed.last.words()}", cause, evidence, command)
        seen = f"{held.last.used_tokens - resting} tokens free after {took:.2f} s"
        return self._row(start, wanted, seen, "", evidence, "")

    def _limits(self) -> dict[str, t.Any]:
        return {"timeout_s": self.timeout, "window_s": self.window_s, "settle_s": self.settle_s}

    def _row(
        self,
        start: float,
        wanted: str,
        seen: str,
        cause: str,
        evidence: dict[str, t.Any],
        command: str,
        unanswered: bool = False,
    ) -> Row:
        return Row(
            self.id,
            not cause,
            wanted,
            seen,
            time.monotonic() - start,
            cause=cause,
            next_command=command,
            passed=int(not cause),
            tried=1,
            unanswered=unanswered,
            evidence={**self._limits(), **evidence},
        )


@dataclass(frozen=True)
class RestingCheck:
    """After all questions the KV pool must be as free as before them. Cached prefixes do not count as used."""

    window_s: float = 15.0
    profile: str = "quick"
    id: str = "kv.resting_level"

    def problem(self) -> str | None:
        return None if self.window_s > 0 else f"resting_level: window_s is {self.window_s}, wanted more than 0"

    def run(self, scene: Scene) -> Row:
        start = time.monotonic()
        resting = scene.resting_tokens
        wanted = f"at most {resting} tokens in use within {self.window_s:g} s"
        command = curl_command(f"{scene.engine.base_url}{LOADS_PATH}", scene.target.key_file)
        if resting is None:
            cause = f"before the first question: {scene.unread.get(LOADS_PATH, 'no reading')}"
            return self._without_reading(scene, start, "a reading before the first question", cause, command)
        try:
            seen = watch(
                scene.engine, lambda load: load.used_tokens <= resting, max(0.1, scene.target.left(self.window_s))
            )
        except HttpError as error:
            return Row(
                self.id,
                False,
                wanted,
                "no answer",
                time.monotonic() - start,
                cause=str(error),
                next_command=command,
                tried=1,
                evidence={"timeout_s": self.window_s, "status": error.status},
            )
        if not seen.held and seen.last.busy:
            why = f"the server is busy with other requests: {seen.last.words()}"
            evidence = {"timeout_s": self.window_s, "resting_tokens": resting, "samples": seen.as_list()}
            return skipped_row(self.id, wanted, why, elapsed_s=time.monotonic() - start, evidence=evidence)
        cause = "" if seen.held else "requests have ended without giving their KV slots back: the pool leaks"
        return Row(
            self.id,
            seen.held,
            wanted,
            seen.last.words(),
            time.monotonic() - start,
            cause=cause,
            next_command=command if cause else "",
            passed=int(seen.held),
            tried=1,
            evidence={"timeout_s": self.window_s, "resting_tokens": resting, "samples": seen.as_list()},
        )

    def _without_reading(self, scene: Scene, start: float, wanted: str, cause: str, command: str) -> Row:
        """No reading before: a busy server can't be judged, one without /v1/loads fails."""
        try:
            read_load(scene.engine, scene.target.left(10.0))
        except HttpError as error:
            return Row(
                self.id,
                False,
                wanted,
                "no answer",
                time.monotonic() - start,
                cause=str(error),
                next_command=command,
                tried=1,
                evidence={"timeout_s": self.window_s, "status": error.status},
            )
        evidence = {"timeout_s": self.window_s, "resting_tokens": None}
        return skipped_row(self.id, wanted, cause, command, time.monotonic() - start, evidence)


@dataclass(frozen=True)
class CountersCheck:
    """The counters on /metrics must have moved at least by what this run asked and got."""

    window_s: float = 5.0
    profile: str = "quick"
    id: str = "metrics.counters"

    def problem(self) -> str | None:
        return None if self.window_s > 0 else f"counters: window_s is {self.window_s}, wanted more than 0"

    def run_after(self, scene: Scene, rows: t.Sequence[Row]) -> Row:
        start = time.monotonic()
        least = least_moved(rows)
        wanted = ", ".join(f"{name} +{least[name]}" for name in COUNTERS)
        command = curl_command(f"{scene.engine.base_url}{METRICS_PATH}")
        held = {"timeout_s": self.window_s, "wanted": least}
        if not any(least.values()):
            return skipped_row(self.id, wanted, "no question of this run was answered", command, evidence=held)
        before = scene.counters
        if before is None:
            cause = f"before the first question: {scene.unread.get(METRICS_PATH, 'no reading')}; is enable-metrics set?"
            return Row(
                self.id, False, wanted, "no counters", 0.0, cause=cause, next_command=command, tried=1, evidence=held
            )
        try:
            moved = self._watch(scene, before, least)
        except HttpError as error:
            return Row(
                self.id,
                False,
                wanted,
                "no counters",
                time.monotonic() - start,
                cause=str(error),
                next_command=command,
                tried=1,
                evidence={**held, "status": error.status},
            )
        behind = [name for name in COUNTERS if moved[name] < least[name]]
        cause = (
            f"{', '.join(behind)} did not move enough: metrics of another engine, or collection has stopped"
            if behind
            else ""
        )
        return Row(
            self.id,
            not behind,
            wanted,
            ", ".join(f"{name} +{moved[name]:.0f}" for name in COUNTERS),
            time.monotonic() - start,
            cause=cause,
            next_command=command if behind else "",
            passed=int(not behind),
            tried=1,
            evidence={**held, "moved": moved},
        )

    def _watch(self, scene: Scene, before: t.Mapping[str, float], least: t.Mapping[str, int]) -> dict[str, float]:
        end = time.monotonic() + self.window_s
        while True:
            moved = moved_since(before, read_counters(scene.engine, max(LAST_LOOK_S, scene.target.left(10.0))))
            if all(moved[name] >= least[name] for name in COUNTERS) or time.monotonic() + 0.25 > end:
                return moved
            time.sleep(0.25)


@dataclass(frozen=True)
class EndpointsCheck:
    """Whatever the checks asked the server for beside questions must have come in time, as it must for monitoring.

    Every path is in the evidence with its longest time.
    """

    max_s: float = 5.0
    profile: str = "quick"
    id: str = "server.endpoints"

    def problem(self) -> str | None:
        return None if self.max_s > 0 else f"endpoints: max_s is {self.max_s}, wanted more than 0"

    def run_after(self, clients: t.Sequence[Client], key_file: str | None) -> Row:
        """Judge the GET requests that these clients have sent; one without an answer has failed its own check."""
        times = {
            f"{client.base_url}{path}": seen for client in dict.fromkeys(clients) for path, seen in client.gets.items()
        }
        wanted = f"each GET within {self.max_s:g} s"
        if not times:
            evidence = {"timeout_s": self.max_s, "max_s": self.max_s, "gets": {}}
            return skipped_row(self.id, wanted, "no GET request was answered", evidence=evidence)
        slowest = max(times, key=lambda url: times[url][1])
        slow = sorted(url for url, (_count, longest) in times.items() if longest > self.max_s)
        cause = (
            f"slow: {', '.join(slow)}; the server's event loop is blocked, or the host is overloaded" if slow else ""
        )
        command = curl_command(slowest, key_file, "-o /dev/null -w '%{time_total} s\\n'")
        return Row(
            self.id,
            not cause,
            wanted,
            f"{len(times)} paths, the slowest {slowest} in {times[slowest][1]:.3f} s",
            0.0,
            cause=cause,
            next_command=command if cause else "",
            passed=int(not cause),
            tried=1,
            evidence={
                "timeout_s": self.max_s,
                "max_s": self.max_s,
                "gets": {url: {"count": count, "longest_s": round(s, 3)} for url, (count, s) in sorted(times.items())},
            },
        )


@dataclass(frozen=True)
class SpeculationCheck:
    """Drafts must be worth their verification: a step gives one token and those drafts of it that were accepted.

    A draft layer that computes nonsense leaves every answer right, and slower than without it. The first token of an
    answer comes with its prompt and is no step's; counted as one, short answers would hide that every draft is refused.
    Where a run's own answers have fewer than min_steps steps, the check asks for a long one itself.
    """

    min_tokens_per_step: float = 1.2
    min_steps: int = 20
    timeout: float = 60.0
    profile: str = "quick"
    id: str = "speculation.accepted"

    def problem(self) -> str | None:
        if self.min_tokens_per_step <= 1:
            return f"speculation: min_tokens_per_step is {self.min_tokens_per_step}, wanted more than 1"
        if self.timeout <= 0:
            return f"speculation: timeout is {self.timeout}, wanted more than 0"
        return None if self.min_steps > 0 else f"speculation: min_steps is {self.min_steps}, wanted at least 1"

    def run_after(self, scene: Scene, rows: t.Sequence[Row]) -> Row:
        """Compare the counters with those before the first question; requests of others count as well.

        Not judged only where a run's questions (rows) have failed without an answer.
        """
        start = time.monotonic()
        wanted = f"at least {self.min_tokens_per_step:g} tokens a step"
        command = curl_command(f"{scene.engine.base_url}{METRICS_PATH}") + f" | grep {VERIFY_STEPS}"
        held: dict[str, t.Any] = {"timeout_s": self.timeout, "min_tokens_per_step": self.min_tokens_per_step}
        if any(row.tries for row in rows) and not any(least_moved(rows).values()):
            return skipped_row(self.id, wanted, "no question of this run was answered", command, evidence=held)
        moved: dict[str, float] = {}
        seen = "no counters"
        if scene.counters is None:
            cause = f"before the first question: {scene.unread.get(METRICS_PATH, 'no reading')}"
        else:
            try:
                moved = self._moved(scene, scene.counters)
                cause, seen = self._judge(moved)
            except HttpError as error:
                cause, held["status"] = str(error), error.status
        return Row(
            self.id,
            not cause,
            wanted,
            seen,
            time.monotonic() - start,
            cause=cause,
            next_command=command if cause else "",
            passed=int(not cause),
            tried=1,
            evidence={**held, "moved": moved},
        )

    def _moved(self, scene: Scene, before: t.Mapping[str, float]) -> dict[str, float]:
        """How much the counters moved, with a long answer of our own where that was too little to judge."""
        moved = moved_since(before, read_counters(scene.engine, max(LAST_LOOK_S, scene.target.left(COUNTERS_S))))
        if moved[VERIFY_STEPS] < self.min_steps:
            payload = {
                "model": scene.target.model,
                "messages": [{"role": "user", "content": "Count from 1 to 200. Write the numbers only, with commas."}],
                "max_tokens": 8 * self.min_steps,
                "temperature": 0,
            }
            chat(scene.target.client, payload, timeout=scene.target.left(self.timeout))
            moved = moved_since(before, read_counters(scene.engine, max(LAST_LOOK_S, scene.target.left(COUNTERS_S))))
        return moved

    def _judge(self, moved: t.Mapping[str, float]) -> tuple[str, str]:
        """Return (what is wrong, "" for nothing; what was seen)."""
        tokens, steps = moved["generation_tokens_total"] - moved["num_requests_total"], moved[VERIFY_STEPS]
        counted = f"{max(0, tokens):.0f} tokens in {steps:.0f} steps"
        if tokens < self.min_steps or 0 < steps < self.min_steps:
            more = "let a question of this profile have a longer answer (max_tokens in models/NAME.yml)"
            cause = f"too few to tell whether drafts are accepted, wanted {self.min_steps} steps; to get more, {more}"
            return cause, counted
        if not steps:
            return "no drafts were verified: speculation is off, though it was asked for", f"{counted} with drafts"
        mean = tokens / steps
        refused = "the drafts are refused: the draft layer computes something else than the model, and costs its time"
        return "" if mean >= self.min_tokens_per_step else refused, f"{mean:.2f} tokens a step: {counted}"


def moved_since(before: t.Mapping[str, float], now: t.Mapping[str, float]) -> dict[str, float]:
    """By how much counters moved. One that is smaller than before began again at zero: the engine was restarted."""
    return {name: now[name] - before[name] if now[name] >= before[name] else now[name] for name in now}


def _carries_text(event: str) -> bool:
    """Whether an event of a stream brings content or reasoning."""
    try:
        deltas = [choice["delta"] for choice in parse_json(event)["choices"]]
        return any(delta.get("content") or delta.get("reasoning_content") for delta in deltas)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def least_moved(rows: t.Sequence[Row]) -> dict[str, int]:
    """What the answers of these rows must have added to the counters, by the server's own token counts."""
    usages = [answer.usage or {} for row in rows for one in row.tries for _mode, answer in one.answers]

    def total(key: str) -> int:
        return sum(token_count(usage, key) or 0 for usage in usages)

    return {
        "prompt_tokens_total": total("prompt_tokens"),
        "generation_tokens_total": total("completion_tokens"),
        "num_requests_total": len(usages),
    }


def reading(client: Client, timeout: float = 10.0) -> tuple[int | None, dict[str, float] | None, dict[str, str]]:
    """Used KV tokens and counters before the first question, and for one that is None why it is, by its path.

    The tokens of a busy server are None: they are not those of an idle one.
    """
    resting: int | None = None
    counters: dict[str, float] | None = None
    unread: dict[str, str] = {}
    try:
        load = read_load(client, timeout)
        if load.busy:
            unread[LOADS_PATH] = f"the server was busy: {load.words()}"
        else:
            resting = load.used_tokens
    except HttpError as error:
        unread[LOADS_PATH] = str(error)
    try:
        counters = read_counters(client, timeout)
    except HttpError as error:
        unread[METRICS_PATH] = str(error)
    return resting, counters, unread
