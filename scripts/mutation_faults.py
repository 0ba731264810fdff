"""The faults of `mutations.py`: one of each part, such as a reviewer could miss.

Each changes one place; `old` stands once in its file. `tests` name the test that is most clearly about the behaviour.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A slip in one file.

    Attributes:
      area: the part of the code that it is in.
      file: below the root of the repository.
      old, new: the text that is replaced, and what it becomes.
      wrong: what then goes wrong, in one sentence.
      tests: files, or ids of tests, that are tried first.
    """

    area: str
    file: str
    old: str
    new: str
    wrong: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        area="scheduler",
        file="jaxserve/sched/core.py",
        old="            if seq in flight.sampled or seq in flight.prefilled:\n",
        new="            if seq in flight.sampled:\n",
        wrong="A prompt that was preempted in flight begins again before its part is known, which then counts twice.",
        tests=(
            "tests/sched/test_overlap.py::test_a_preempted_prompt_is_not_begun_again_before_its_part_in_flight_is_known",
        ),
    ),
    Fault(
        area="pages",
        file="jaxserve/sched/pages.py",
        old="popitem(last=False)\n",
        new="popitem()\n",
        wrong="The cached page that was used last is evicted, in place of the one that was used longest ago.",
        tests=("tests/sched/test_page_shares.py::test_an_eviction_leaves_the_share_of_others",),
    ),
    Fault(
        area="prefix",
        file="jaxserve/sched/prefix.py",
        old="            if entry is None or entry.parent is not parent or entry.content != contents[number]:\n",
        new="            if entry is None or entry.content != contents[number]:\n",
        wrong="Behind a collision of hashes, pages of another beginning are found.",
        tests=("tests/sched/test_prefix.py::test_collisions_are_misses_everywhere",),
    ),
    Fault(
        area="sampling",
        file="jaxserve/runtime/sampling_draw.py",
        old="        weights = jnp.where(logits >= floor[:, None], weights, 0.0)\n",
        new="",
        wrong="top_p is a share of all tokens, and not of those that min_p and top_k have left.",
        tests=("tests/runtime/test_sampling_draw.py::test_limits_keep_what_a_sort_keeps",),
    ),
    Fault(
        area="step",
        file="jaxserve/runtime/step.py",
        old="        taken = (first <= token) & (token < end)  # [R, T]\n",
        new="        taken = (first <= token) & (token <= end)  # [R, T]\n",
        wrong="An embedding has the first token of the next prompt of its step in it.",
        tests=("tests/runtime/test_pooled_sums.py",),
    ),
    Fault(
        area="attention",
        file="jaxserve/kernels/xla_softmax.py",
        old="        seen &= distance > -spec.window\n",
        new="        seen &= distance >= -spec.window\n",
        wrong="A window of the plain XLA attention has one token too many.",
        tests=("tests/kernels/test_cpu_attention.py::test_named_case_matches_the_oracle",),
    ),
    Fault(
        area="loader",
        file="jaxserve/models/partition.py",
        old="                place = (head * self.copies + copy, head, 1)\n",
        new="                place = (copy * heads + head, head, 1)\n",
        wrong="Copies of key/value heads lie by turns, so that queries meet the keys of other heads.",
        tests=("tests/models/test_loading.py::test_partition_of_heads",),
    ),
    Fault(
        area="template",
        file="jaxserve/text/chat.py",
        old="    ensure_ascii: bool = False,\n",
        new="    ensure_ascii: bool = True,\n",
        wrong="Tools with letters beyond ASCII reach a model as escapes, which it has not seen in training.",
        tests=("tests/text/test_chat_template.py::test_text_and_ids_match_transformers",),
    ),
    Fault(
        area="stream",
        file="jaxserve/text/detokenizer.py",
        old="range(max(0, len(held) - longest + 1), len(held))",
        new="range(max(0, len(held) - longest + 2), len(held))",
        wrong="A stream shows the beginning of a stop string that lacks its last character alone.",
        tests=("tests/text/test_detokenizer.py::test_stop_strings_at_any_split",),
    ),
    Fault(
        area="tools",
        file="jaxserve/serve/http/formats/base.py",
        old="                self._num_calls += 1\n",
        new="                self._num_calls = max(self._num_calls, 1)\n",
        wrong="All calls of an answer have one number, so that clients join their arguments.",
        tests=("tests/serve/http/test_formats.py::test_a_transcript_is_read_whole_and_in_pieces",),
    ),
    Fault(
        area="resume",
        file="jaxserve/serve/received.py",
        old="            part.num_chars, part.finished = one.text_len, one.finished\n",
        new="            part.num_chars = one.text_len\n",
        wrong="A request that was resumed twice waits for a sequence that had ended before.",
        tests=(
            "tests/serve/test_received.py::test_a_resumed_request_that_has_not_begun_here_has_the_ends_that_it_came_with",
        ),
    ),
    Fault(
        area="store",
        file="jaxserve/kv/bounded_index.py",
        old="            self.num_bytes += size - self._items[name][1]\n",
        new="",
        wrong="A page that is written again with another size is not counted, so a store outgrows its bound.",
        tests=("tests/kv/test_bounded_index.py",),
    ),
    Fault(
        area="handoff",
        file="jaxserve/kv/handoff.py",
        old='return mac(secret, b"frame", *name, struct.pack',
        new='return mac(secret, b"frame", struct.pack',
        wrong="A genuine frame of another prompt is taken for one of this lease.",
        tests=("tests/serve/test_handoff.py::test_a_frame_belongs_to_its_lease_and_place",),
    ),
    Fault(
        area="adapters",
        file="jaxserve/sched/adapter_slots.py",
        old="        slot = self._slots.pop(digest, 0)\n",
        new="        slot = self._slots.get(digest, 0)\n",
        wrong="The adapter that was loaded first gives way, however lately it was used.",
        tests=("tests/sched/test_adapter_slots.py::test_the_adapter_that_was_used_longest_ago_gives_way",),
    ),
    Fault(
        area="speculation",
        file="jaxserve/runtime/rounds.py",
        old="                (lens[:, None] + 1 + place).reshape(-1),\n",
        new="                jnp.repeat(lens + 1, width),\n",
        wrong="All places of a round draw with the noise of its first, so that tokens in a row are alike too often.",
        tests=("tests/runtime/test_rounds.py::test_tokens_have_the_distribution_of_the_model",),
    ),
    Fault(
        area="quantisation",
        file="jaxserve/models/quantised/groups.py",
        old="np.arange(inputs.start, inputs.stop, dtype=np.int32) // size - np.int32(inputs.start // size)\n",
        new="np.arange(inputs.stop - inputs.start, dtype=np.int32) // size\n",
        wrong="A part of a weight that begins within a group has the scales of its neighbours.",
        tests=("tests/models/test_quantised_slices.py::test_any_slice_is_the_oracles",),
    ),
    Fault(
        area="planner",
        file="jaxserve/lab/planner/fit.py",
        old="        while tensor <= candidate.num_devices:\n",
        new="        while tensor < candidate.num_devices:\n",
        wrong="A plan that does not fit is told of a topology larger than it needs.",
        tests=(
            "tests/planner/test_fit.py::test_too_large_is_said_before_anything_compiles_with_the_smallest_that_fits",
        ),
    ),
    Fault(
        area="simulator",
        file="jaxserve/lab/simulation/engine.py",
        old="                preemptions=max(0, live.num_setups - num_sequences),\n",
        new="                preemptions=max(0, live.num_setups - 1),\n",
        wrong="Each further sequence of a request counts as a preemption.",
        tests=("tests/sched/test_simulate.py::test_only_rows_beyond_one_a_sequence_are_preemptions",),
    ),
    Fault(
        area="router",
        file="jaxserve/routing/prompts.py",
        old="        for block in reversed(key[: self._max_blocks]):\n",
        new="        for block in key[: self._max_blocks]:\n",
        wrong="A full table forgets the beginnings of prompts before their ends, so that prompts lose their replica.",
        tests=("tests/routing/test_routing.py::test_what_is_left_of_a_chain_is_its_beginning",),
    ),
    Fault(
        area="config",
        file="jaxserve/config/__init__.py",
        old="            settings[name] = _Setting(value, place(name), folder)\n",
        new="            settings[name] = _Setting(value, place(name))\n",
        wrong="Relative paths in a file belong to the working directory, and not to the directory of the file.",
        tests=("tests/test_config.py::test_paths_in_a_file_are_relative_to_the_file",),
    ),
)
