# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible's default output, plus a sign of life while a task runs long.

A model load or an engine install takes minutes, and the default output is silent for all of them. This callback prints
one line for each stretch of silence (what runs, how long so far) and shows a waiting loop as progress instead of as a
series of failures. A failure ends with its message: what the message was made from is shown with -v only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

from ansible.plugins.callback.default import CallbackModule as DefaultCallback

DOCUMENTATION = """
name: progress
type: stdout
short_description: default output with progress for long tasks
description:
  - Prints the task's name and the time so far whenever a task has been silent for a while.
  - A result that carries RV(progress) in an until loop is shown as progress, not as a failure.
  - Of a failure with a message, the reports, plans and argument specs behind it are shown with C(-v) only.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
options:
  heartbeat_seconds:
    description: Length of the silence after which a line is printed.
    type: int
    default: 20
    ini:
      - section: callback_progress
        key: heartbeat_seconds
    env:
      - name: OPS_HEARTBEAT_SECONDS
"""

# Hundreds of lines each; all that matters in them is in the message.
BEHIND_A_MESSAGE = {"ansible_loop_var", "report", "plan", "metrics", "verdict", "refusals", "warnings_of_plan"}
BEHIND_A_MESSAGE |= {"table", "drift", "argument_errors", "argument_spec_data", "validate_args_context"}
BEHIND_A_MESSAGE |= {"assertion", "evaluated_to"}


class CallbackModule(DefaultCallback):
    """Default stdout callback with a heartbeat."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "progress"

    def __init__(self) -> None:
        super().__init__()
        self._task_name = ""
        self._task_started = 0.0
        self._last_output = 0.0
        self._stopped = threading.Event()

    def v2_playbook_on_start(self, playbook) -> None:
        super().v2_playbook_on_start(playbook)
        threading.Thread(target=self._beat, daemon=True).start()

    def v2_playbook_on_task_start(self, task, is_conditional) -> None:
        super().v2_playbook_on_task_start(task, is_conditional)
        self._begin(task.get_name())

    def v2_playbook_on_handler_task_start(self, task) -> None:
        super().v2_playbook_on_handler_task_start(task)
        self._begin(task.get_name())

    def v2_runner_retry(self, result) -> None:
        progress = result.result.get("progress") if hasattr(result, "result") else result._result.get("progress")
        if progress is None:
            super().v2_runner_retry(result)
            return
        self._last_output = time.monotonic()
        # With skipped hosts hidden, Ansible prints a task's title only with its result.
        if self._last_task_banner != result.task._uuid:
            self._print_task_banner(result.task)
        self._display.display(f"  ... {progress}", color="cyan")

    def v2_playbook_on_stats(self, stats) -> None:
        self._stopped.set()
        super().v2_playbook_on_stats(stats)

    def _dump_results(self, result, *args, **kwargs) -> str:
        if result.get("msg") and not self._display.verbosity:
            hidden = BEHIND_A_MESSAGE | {result.get("ansible_loop_var")}
            result = {name: value for name, value in result.items() if name not in hidden}
        return super()._dump_results(result, *args, **kwargs)

    def _begin(self, name: str) -> None:
        self._task_name = name
        self._task_started = self._last_output = time.monotonic()

    def _beat(self) -> None:
        every = self.get_option("heartbeat_seconds")
        while not self._stopped.wait(1):
            now = time.monotonic()
            if self._task_name and now - self._last_output >= every:
                self._last_output = now
                minutes, seconds = divmod(int(now - self._task_started), 60)
                line = f"  ... {self._task_name}: {minutes}m{seconds:02d}s\n"
                # Straight to the descriptor: worker processes are forked at any moment, and a lock of Python's
                # output layer that this thread holds right then would stay locked in the worker for ever.
                with contextlib.suppress(OSError):  # nobody may read it any more, as after | head -1
                    os.write(sys.__stdout__.fileno(), line.encode())
