"""`instrument.load`, and the class `Run` that it returns: the tables of a run or sweep, and queries on them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from ..errors import ConfigError, Problem
from ..storage.remote_folder import is_address
from ..storage.run_search import find_runs
from .run_tables import RunTables, check_table
from .sql import lazy_frame, run_query

if TYPE_CHECKING:
    import polars as pl

    from .dataset import ActivationDataset
    from .features import Features


def load(path: str | Path | Sequence[str | Path]) -> Run:
    """Open the folder of a run, or a folder that contains several runs, such as the folder of a sweep; or several such folders.

    Subfolders whose name begins with a dot are skipped: a sweep moves the folders of repeated jobs there.

    Args:
        path: A local folder, or the address of a remote folder such as `s3://bucket/prefix`. A list: several local folders.

    Returns:
        A `Run` with the tables of all runs found at or below `path`.

    Raises:
        NoRunError: The folder does not exist or contains no run.
        ConfigError: The address is invalid, or a package needed to read from it is not installed.
    """
    if isinstance(path, str) or not isinstance(path, Sequence):  # the path of a store of fsspec is no Path
        return Run(*find_runs(path))
    if len(path) == 0 or any(is_address(each) for each in path):
        raise ConfigError(Problem("path", "must be a folder, or a list of local folders", str(path)))
    folders = list(dict.fromkeys(folder.absolute() for each in path for folder in find_runs(each)[1]))
    return Run(folders[0] if len(folders) == 1 else Path(os.path.commonpath(folders)), folders)


class Run(RunTables):
    """The recorded data of one run, or of several runs in one folder.

    Create it with `instrument.load`. Each table is a pandas DataFrame that is read on first access.

    If the folder contains several runs, every table has these additional columns: `run`, the path of the run relative
    to the opened folder; `seed`; and one column for each override with which any of the runs was started, such as
    `hooks.tame.norm`.

    A run that is still in progress can be read. Methods return the rows that exist when they are called. `infos` and
    the tables that are attributes, such as `stats`, are cached after the first access: call `load` again to read newer
    rows.

    Attributes:
        path: The folder that was opened.
        folders: The folders of the runs, in the order of the rows of `runs`.
    """

    def _repr_html_(self) -> str:
        from .overview import to_html

        return to_html(self)

    @property
    def findings(self) -> pd.DataFrame:
        """The rules that fired, with what to do next, and other observations about the run. One row per finding.

        The columns are `what`, `where`, `step` (null for the run as a whole), `value` (as text), `severity` (`error`,
        `warning` or `info`), `number`, `advice`, `rule` (empty for other observations), `cause` (the rule of which this is a
        consequence; empty if none is known), `statistic`, `threshold`, `layer`, `hook` and `role`. The first finding is the most
        important one; each problem is followed by its consequences. It requires a single run.

        Raises:
            InstrumentError: There are several runs.
        """
        from .diagnosis import Finding
        from .findings import findings

        rows = [astuple(finding) for finding in findings(self)]
        frame = pd.DataFrame(rows, columns=[field.name for field in fields(Finding)])
        return frame.astype({"step": "Int64", "number": "float64", "threshold": "float64"})

    def effects_of(
        self,
        key: str,
        *,
        baseline: Any = None,
        by: str | Sequence[str] = (),
        steps: tuple[int | None, int | None] = (None, None),
        confidence: float = 0.95,
    ) -> pd.DataFrame:
        """Estimate the effect of one configuration key on metrics and statistics; needs several runs.

        Finished runs are paired if they have the same seed and the same configuration, except for this key, settings that do not
        affect training, and hooks that only record. Each run contributes the mean over its steps per location and statistic; for
        evaluation metrics, the value of the last evaluation. The interval is Student's for the mean of n differences d, one per seed,

            mean(d) ± t((1 + confidence) / 2, n - 1) * s(d) / sqrt(n)

        with n - 1 degrees of freedom (NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.5.2,
        https://doi.org/10.18434/M32189). It assumes that the differences have a normal distribution.

        `p_adjusted` accounts for the number of intervals: among the rows with `survives`, the expected share of rows without an effect
        is at most 1 - confidence (Y. Benjamini and Y. Hochberg, Journal of the Royal Statistical Society B 57 (1995), 289-300).

        If keys that are not in `by` differ as well, the difference of a seed is the mean over its pairs, which are not independent
        (S. H. Hurlbert, Ecological Monographs 54 (1984), 187-211).

        Args:
            key: A key such as `hooks.tame.norm` or `optimizer.lr`, a hook such as `hooks.tame`, or a group such as
                `model`.
            baseline: The value that the others are compared with. Default: null or a missing key, if any run has it;
                else the smallest number (false before true); else the first value.
            by: Other keys in which the runs differ. Each becomes a column, and each combination of their values has its
                own rows.
            steps: Half-open range of steps (first, end); None leaves a side open. For evaluations, the number of steps
                done before the evaluation counts.
            confidence: Confidence level of the intervals, between 0 and 1.

        Returns:
            One row for each value, location and statistic with at least one pair:

            - `value`, `baseline`: the two values of the key; lists and mappings as YAML text
            - one column for each key in `by`
            - `table`, `phase`, `hook`, `layer`, `kind`, `role`, `path`, `scope`, `statistic`: what was measured
            - `n`: the number of seeds used
            - `mean_baseline`, `mean_value`: means over these seeds
            - `difference`: the mean of value - baseline
            - `ci_low`, `ci_high`: the confidence interval; null for a single seed
            - `confidence`: the confidence level
            - `p_value`: of the test that the difference is zero; null without an interval
            - `p_adjusted`: the p-value adjusted for all rows (Benjamini-Hochberg)
            - `survives`: whether `p_adjusted` is below 1 - confidence
            - `pairs`: the number of pairs used
            - `not_finite`: pairs excluded because a number is NaN or infinite
            - `one_sided`: pairs excluded because only one of the two runs has a number

            `attrs["intervals"]` is the number of intervals. `attrs["pairs"]` lists each pair as (value, run, baseline run).
            `attrs["left_out"]` maps each unpaired run to the reason.

        Raises:
            InstrumentError: The runs do not differ in this key, the key or the value does not exist, no two runs can be
                paired, or another argument has a wrong value.
        """
        from .config_key_effects import effects_of

        return effects_of(self, key, baseline=baseline, by=by, steps=steps, confidence=confidence)

    def features(
        self,
        layer: str,
        *,
        hook: str | None = None,
        role: str = "output",
        phase: str | None = None,
        step: int | Collection[int] | None = None,
        epoch: int | Collection[int] | None = None,
        call: int | Collection[int] | None = None,
        path: str | None = None,
        out: str | Path | None = None,
    ) -> Features:
        """Join the recorded tensors of a layer over all batches: one array in the order of the dataset.

            X, y, ids = run.features("avgpool")

        The tensors of all processes are joined. Values are read one row group at a time, so the call needs little more
        memory than the array.

        Args:
            layer: The name of the layer; `.` for the model itself.
            hook: The name of the hook. Required if several hooks recorded tensors of the layer.
            role: The role of the tensors, such as `output`, `input` or `grad_output`.
            phase: The phase, such as `train` or `eval`. Required if tensors were recorded in several phases.
            step: The step or steps. Required, or `epoch`, if a sample occurs in several steps.
            epoch: The epoch or epochs. Default: all.
            call: The index of the module's call in the micro-step. Required if there are several calls. With a list or a range, `X` has
                the dimension of the recorded calls among them, in ascending order, after that of the samples.
            path: The path of the tensor in a nested output, such as `last_hidden_state`. Required if there are several.
            out: A `.npy` file. `X` is written to it and mapped from it, for arrays larger than memory. Default: None,
                in memory.

        Returns:
            `Features(X, y, ids)`.

            - `X`: [samples, ...], in the recorded dtype. Dimensions of size 1 at the end of the shape of a sample are
              removed, so the output [N, 2048, 1, 1] of a global pooling layer gives [N, 2048]. bfloat16 and float8 are
              converted to float32. [samples, calls, ...] for several calls; calls that the batch of a sample does not have are
              NaN, or 0 for integers.
            - `y`: the target of each sample, [samples]; None without scalar targets
            - `ids`: the index of each sample in the complete dataset, in ascending order. Ids that are strings are in
              the order in which they were recorded.

            A sample that occurs several times in one step, for example with a sampler that draws with replacement, is
            returned once: its first occurrence, in the order of the micro-batches, ranks and positions in the batch.

        Raises:
            ConfigError: Nothing matches, or several hooks, roles, phases, paths or calls match; a sample occurs in several
                steps; dimension 0 of the tensors is not that of the samples; or the ids of the samples are unknown. The
                message has the values that exist.
            InstrumentError: A tensor cannot be read.

        Warns:
            InstrumentWarning: Some tensors are left out, because the ids of their samples are unknown: the last batch of
                a killed run, or batches that the loop did not name.
        """
        from .features import FeatureSelection, features_of

        self.check_single()
        selection = FeatureSelection(layer, hook, role, phase, step, epoch, call, path)
        return features_of(self.files[0], selection, None if out is None else Path(out))

    def dataset(
        self,
        layer: str | None = None,
        *,
        layers: Sequence[str] | None = None,
        flatten: Literal["tokens"] | None = None,
        mask: str | None = "attention_mask",
        tokens: str | None = "input_ids",
        special_tokens: Collection[int] = (),
        with_targets: bool | str = False,
        hook: str | None = None,
        role: str = "output",
        phase: str | None = None,
        step: int | Collection[int] | None = None,
        epoch: int | Collection[int] | None = None,
        call: int | Collection[int] | None = None,
        path: str | None = None,
    ) -> ActivationDataset:
        """Return the recorded tensors of a layer, or of several layers, as a dataset of PyTorch.

            data = run.dataset("blocks.5", flatten="tokens")
            for batch in data.batches(4096, shuffle=0):
                batch["x"], batch["token"], batch["position"], batch["id"]

        An item is an entry of dimension 0, as in `features`, or a position of a sequence. Samples that were recorded several times are
        several items. The items of several runs follow each other. Values are read when they are needed.

        Args:
            layer: The name of the layer; `.` for the model itself.
            layers: Several layers instead of `layer`. `x` is then a dictionary with the tensor of each layer, for the same item.
            flatten: `tokens`: an item is a position of dimensions 0 and 1, at which the mask is true. Default: None.
            mask: The positions that are items, [samples, positions], true or not 0: the name of a recorded input of the model. None:
                all positions.
            tokens: The token ids, [samples, positions]: the name of a recorded input of the model. The default is left out if it was
                not recorded.
            special_tokens: Token ids whose positions are left out.
            with_targets: True: the recorded target of each sample. A name: that of a recorded input of the model, such as `labels`.
            hook, role, phase, step, epoch, path: As in `features`. Without `step` and `epoch`, all are selected.
            call: The index of the module's call in the micro-step. With a list or a range, the entries of each call are items, such as the
                tokens of a generation.

        Returns:
            A map-style dataset; its method `batches` returns an iterable one. The entries of an item:

            - `x`: the tensor in the recorded dtype, without dimensions of size 1 at its end
            - `id`, `run` (index in `folders`) and `step`: int64; ids may be strings
            - `call`, int64, if `call` is a list or a range
            - `position` in dimension 1 of the call, int64, with `flatten`
            - `token`: the token id, or without `flatten` those of the sample
            - `mask`: without `flatten`, if it was recorded
            - `target`: with `with_targets`

        Raises:
            ConfigError: As in `features`; or the mask, tokens or another layer were not recorded for the same samples.
        """
        from .dataset import ActivationDataset, Items
        from .features import FeatureSelection

        is_valid = isinstance(layer, str | None) and not isinstance(layers, str) and layers != []
        if not is_valid or (layer is None) == (layers is None):
            given = None if layer is None and layers is None else f"layer={layer!r}, layers={layers!r}"
            fix = "run.dataset(layers=['blocks.0'])"
            raise ConfigError(Problem("layer", "pass one layer, or a list of layers", given, fix=fix))
        names = [layer] if layer is not None else list(dict.fromkeys(layers or ()))
        selections = [FeatureSelection(each, hook, role, phase, step, epoch, call, path) for each in names]
        items = Items(flatten, mask, tokens, special_tokens, with_targets)
        return ActivationDataset(self.files, selections, items, single=layer is not None)

    def sql(self, query: str) -> pd.DataFrame:
        """Run a SQL query with DuckDB on the files of the runs.

        DuckDB reads only the columns and row groups that the query needs. Files of tables that the query does not name
        are not opened. The views are the tables of a run, and `runs`. If the folder contains several runs, each view
        also has the columns `run`, `seed` and the overrides, with lists and mappings as JSON text. Files that are
        excluded by a condition on these columns are not opened.

        Args:
            query: A DuckDB query, such as `SELECT layer, avg(l2) FROM stats GROUP BY layer`.

        Returns:
            The result as a pandas DataFrame.

        Raises:
            ConfigError: The query is invalid.
            InstrumentError: DuckDB is not installed, or the query fails while it runs.
        """
        return run_query(self, query)

    def lazy(self, table: str) -> pl.LazyFrame:
        """Return a table as a polars LazyFrame, with the columns and the order of `sql`.

        Files are read by DuckDB when the frame is collected, and only the columns and rows that are needed.

        Args:
            table: Name of the table, such as `stats`.

        Raises:
            ValueError: The table does not exist.
            InstrumentError: polars or DuckDB is not installed.
        """
        check_table(table)
        return lazy_frame(self, table)
