"""The keys of launchd.plist(5) and their types, as docs/launchd.md lists them; a test holds them together."""

from __future__ import annotations

KEYS = {
    "Label": "string", "Disabled": "boolean", "UserName": "string", "GroupName": "string",
    "inetdCompatibility": "dictionary", "LimitLoadToHosts": "array", "LimitLoadFromHosts": "array",
    "LimitLoadToSessionType": "string or array", "LimitLoadToHardware": "dictionary",
    "LimitLoadFromHardware": "dictionary", "Program": "string", "BundleProgram": "string",
    "ProgramArguments": "array", "EnableGlobbing": "boolean", "EnableTransactions": "boolean",
    "EnablePressuredExit": "boolean", "OnDemand": "boolean", "ServiceIPC": "boolean",
    "KeepAlive": "boolean or dictionary", "RunAtLoad": "boolean", "RootDirectory": "string",
    "WorkingDirectory": "string", "EnvironmentVariables": "dictionary", "Umask": "integer or string",
    "TimeOut": "integer", "ExitTimeOut": "integer", "ThrottleInterval": "integer", "InitGroups": "boolean",
    "WatchPaths": "array", "QueueDirectories": "array", "StartOnMount": "boolean", "StartInterval": "integer",
    "StartCalendarInterval": "dictionary or array", "StandardInPath": "string", "StandardOutPath": "string",
    "StandardErrorPath": "string", "Debug": "boolean", "WaitForDebugger": "boolean",
    "SoftResourceLimits": "dictionary", "HardResourceLimits": "dictionary", "Nice": "integer",
    "ProcessType": "string", "AbandonProcessGroup": "boolean", "LowPriorityIO": "boolean",
    "LowPriorityBackgroundIO": "boolean", "MaterializeDatalessFiles": "boolean", "LaunchOnlyOnce": "boolean",
    "MachServices": "dictionary", "Sockets": "dictionary", "LaunchEvents": "dictionary", "HopefullyExitsLast": "boolean",
    "HopefullyExitsFirst": "boolean", "SessionCreate": "boolean", "LegacyTimers": "boolean",
    "AssociatedBundleIdentifiers": "string or array",
}  # fmt: skip
WITHIN = {
    "KeepAlive": {
        "SuccessfulExit": "boolean", "NetworkState": "boolean", "PathState": "dictionary",
        "OtherJobEnabled": "dictionary", "Crashed": "boolean", "AfterInitialDemand": "boolean",
    },
    "Sockets": {
        "SockType": "string", "SockPassive": "boolean", "SockNodeName": "string", "SockServiceName": "string or integer",
        "SockFamily": "string", "SockProtocol": "string", "SockPathName": "string", "SecureSocketWithKey": "string",
        "SockPathOwner": "integer", "SockPathGroup": "integer", "SockPathMode": "integer",
        "Bonjour": "boolean or string or array", "MulticastGroup": "string",
    },
    "SoftResourceLimits": {
        "Core": "integer", "CPU": "integer", "Data": "integer", "FileSize": "integer", "MemoryLock": "integer",
        "NumberOfFiles": "integer", "NumberOfProcesses": "integer", "ResidentSetSize": "integer", "Stack": "integer",
    },
}  # fmt: skip
WITHIN["HardResourceLimits"] = WITHIN["SoftResourceLimits"]
TYPES = {"string": str, "boolean": bool, "integer": int, "array": list, "dictionary": dict}


def is_a(value: object, types: str) -> bool:
    """Whether a value out of plistlib is of one of the types, as they are written above."""
    return any(type(value) is TYPES[name] for name in types.split(" or "))
