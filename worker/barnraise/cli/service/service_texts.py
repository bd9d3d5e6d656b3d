"""Write what systemd, launchd and Windows' Task Scheduler need to start a worker. Pure.

Each starts the worker with a low priority when its person logs in, and again when it crashes. A
worker whose run has ended, or whom the site refuses, ends in order and is not started again.
"""

import plistlib
import subprocess
from dataclasses import dataclass
from xml.sax.saxutils import escape

NICENESS = 19
RESTART_SECONDS = 5  # after a crash
RESTARTS = 5  # crashes within `RESTART_WINDOW_SECONDS` after which systemd gives up
RESTART_WINDOW_SECONDS = 600
STOP_SECONDS = 30  # a worker that is stopped leaves in less than ten
# launchd knows no number of restarts: it waits so long between two.
THROTTLE_SECONDS = 60
TASK_NAMESPACE = "http://schemas.microsoft.com/windows/2004/02/mit/task"


@dataclass(frozen=True)
class ServiceText:
    """What a service starts."""

    name: str  # "barnraise", or with the digest of its home behind it
    description: str  # for people
    command: tuple[str, ...]  # the program and its arguments
    folder: str  # in which it starts
    environment: dict[str, str]  # variables that it needs besides those of its session
    user: str = ""  # whose it is, on Windows and of a service of the system


def render_systemd_unit(service: ServiceText) -> bytes:
    """Write a unit of the user's systemd or, if a user is named, of the system's.

    Between control groups only their weights count, and a unit is one: niceness is not enough.
    """
    environment = "".join(
        f"Environment={_quote_for_systemd(f'{name}={value}')}\n"
        for name, value in sorted(service.environment.items())
    )
    command = " ".join(_quote_for_systemd(part, is_command=True) for part in service.command)
    user = f"User={service.user}\n" if service.user else ""
    target = "multi-user.target" if service.user else "default.target"
    network = "Wants=network-online.target\nAfter=network-online.target\n" if service.user else ""
    return f"""\
[Unit]
Description={service.description.replace("%", "%%")}
{network}StartLimitIntervalSec={RESTART_WINDOW_SECONDS}
StartLimitBurst={RESTARTS}

[Service]
Type=exec
{user}ExecStart={command}
WorkingDirectory={_escape_for_systemd(service.folder)}
{environment}Nice={NICENESS}
CPUWeight=1
IOSchedulingClass=idle
Restart=on-failure
RestartSec={RESTART_SECONDS}
TimeoutStopSec={STOP_SECONDS}

[Install]
WantedBy={target}
""".encode()


def _escape_for_systemd(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "%%")


def _quote_for_systemd(text: str, *, is_command: bool = False) -> str:
    """Quote a word as systemd.syntax(7) says; in a command, `$` names variables as well."""
    quoted = _escape_for_systemd(text).replace('"', '\\"')
    return f'"{quoted.replace("$", "$$") if is_command else quoted}"'


def render_launchd_agent(service: ServiceText) -> bytes:
    """Write the property list of a launchd agent. Its log is the worker's own."""
    return plistlib.dumps(
        {
            "Label": f"org.barnraise.{service.name}",
            "ProgramArguments": list(service.command),
            "WorkingDirectory": service.folder,
            "EnvironmentVariables": service.environment,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": THROTTLE_SECONDS,
            "ExitTimeOut": STOP_SECONDS,
            "ProcessType": "Background",
            "Nice": NICENESS,
            "LowPriorityIO": True,
        }
    )


def render_scheduled_task(service: ServiceText) -> bytes:
    """Write a task of Windows' Task Scheduler, which starts when its user logs in.

    Tasks have no environment of their own: the variables of the user's session count. Priority 7 is
    Windows' "below normal", with a low priority of its reads and writes.
    """
    program, *arguments = service.command
    return f"""\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="{TASK_NAMESPACE}">
  <RegistrationInfo>
    <Description>{escape(service.description)}</Description>
  </RegistrationInfo>
  <Triggers>
    <LogonTrigger>
      <Enabled>true</Enabled>
      <UserId>{escape(service.user)}</UserId>
    </LogonTrigger>
  </Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>{escape(service.user)}</UserId>
      <LogonType>InteractiveToken</LogonType>
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <StartWhenAvailable>true</StartWhenAvailable>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Priority>7</Priority>
    <RestartOnFailure>
      <Interval>PT1M</Interval>
      <Count>{RESTARTS}</Count>
    </RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{escape(program)}</Command>
      <Arguments>{escape(subprocess.list2cmdline(arguments))}</Arguments>
      <WorkingDirectory>{escape(service.folder)}</WorkingDirectory>
    </Exec>
  </Actions>
</Task>
""".encode("utf-16")
