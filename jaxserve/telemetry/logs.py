"""A log record as one line of JSON.

The names are those that collectors know: time, level, logger, message, error; each field of a call's `extra` stands
beside them under its own name.
"""

import datetime
import json
import logging

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OURS = frozenset({"time", "level", "logger", "message", "error"})


class JsonFormatter(logging.Formatter):
    """One JSON object a record: never a line break within, never a record that cannot be written."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in _OURS and not name.startswith("_"):  # other libraries' own
                fields[name] = value
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=repr).encode("utf-8", "replace").decode()
