"""The abilities of a plugin, in a module of their own: ``-classad`` must not import anything slow (no dataclasses)."""

from __future__ import annotations

from collections.abc import Mapping


class Abilities:
    """The answer to ``-classad``, separate from the protocol class so that the query imports nothing slow.

    :param methods: URL schemes, letters and digits only (HTCondor cuts a scheme at its last ``+``, ``-`` or ``.``).
        Empty: any (the front ends of other plugins).
    :param version: version of the plugin, advertised as PluginVersion.
    :param upload: False for a protocol that can only download; the plugin then refuses uploads file by file.
    :param download: False for a protocol that can only upload.
    :param verifies: uploads end with the destination's confirmation (size or digest).
    :param parallel: default number of files of one batch that move at once (the knob overrides it).
    :param missing_requirement: the requirement that this node does not meet, with the remedy. The plugin then
        advertises no method, and refuses each file with this sentence. "" when nothing is missing.
    :param multi_stream_methods: methods whose uploads send one file over STAGEOUT_PARALLELISM streams.
    :param startd_attributes: scalars to publish in the slot ads.
    :param credentials: services whose tokens (``SERVICE.use``, ``SERVICE_HANDLE.use``) its transfers need although no
        URL names them.
    :param batch_files: maximum number of files of one call, from any number of jobs of one owner, for plugins whose
        calls are expensive. It replaces a smaller STAGEOUT_BATCH_FILES of the sandbox manager. 0: no preference.
    :param job_attributes: attributes of the job's ad that a transfer reads. Others are missing when output is sent
        after the job's end. Jobs with different values never share a call.
    :param proxy_methods: methods that use the job's X.509 proxy when the URL names no credential.
    :param multi_stream_downloads: methods whose downloads fetch one file over STAGEOUT_PARALLELISM streams, and only
        its first bytes when PluginData has ``sample_bytes``.
    :param deletes: methods for which the plugin deletes files (``-delete``).
    :param one_status: HTCondor's own plugin for these methods has the exit status 1 for every failure. The plugin then
        uses the status 11, for temporary failures, only for access points that read it.
    :param reads: files, in addition to the modules, on which this declaration depends.
    :raises ValueError: for a declaration that HTCondor would misread.
    """

    __slots__ = (
        "batch_files",
        "credentials",
        "deletes",
        "download",
        "job_attributes",
        "methods",
        "missing_requirement",
        "multi_stream_downloads",
        "multi_stream_methods",
        "one_status",
        "parallel",
        "proxy_methods",
        "reads",
        "startd_attributes",
        "upload",
        "verifies",
        "version",
    )

    def __init__(
        self,
        methods: tuple[str, ...],
        version: str,
        download: bool = True,
        upload: bool = True,
        verifies: bool = False,
        parallel: int = 4,
        missing_requirement: str = "",
        startd_attributes: Mapping[str, object] | None = None,
        credentials: tuple[str, ...] = (),
        batch_files: int = 0,
        job_attributes: tuple[str, ...] = (),
        proxy_methods: tuple[str, ...] = (),
        multi_stream_methods: tuple[str, ...] = (),
        multi_stream_downloads: tuple[str, ...] = (),
        deletes: tuple[str, ...] = (),
        one_status: bool = False,
        reads: tuple[str, ...] = (),
    ) -> None:
        self.methods = methods
        self.version = version
        self.download = download
        self.upload = upload
        self.verifies = verifies
        self.parallel = parallel
        self.missing_requirement = missing_requirement
        self.startd_attributes = dict(startd_attributes or {})
        self.credentials = credentials
        self.batch_files = batch_files
        self.job_attributes = job_attributes
        self.multi_stream_downloads = multi_stream_downloads
        self.proxy_methods = proxy_methods
        self.multi_stream_methods = multi_stream_methods
        self.deletes = deletes
        self.one_status = one_status
        self.reads = reads
        self._check()

    def _check(self) -> None:
        for method in self.methods:
            if not (method.isascii() and method.isalnum() and method[0].isalpha()):
                raise ValueError(f"method {method!r}: write letters and digits only, HTCondor finds no other")
        for name, value in self.startd_attributes.items():
            if not (name.isascii() and name.isidentifier()):
                raise ValueError(f"startd attribute {name!r}: not the name of an attribute")
            if not isinstance(value, (str, int, float)):
                raise ValueError(f"startd attribute {name}: HTCondor publishes scalars only")
