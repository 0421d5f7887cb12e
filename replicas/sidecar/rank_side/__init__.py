"""The rank's side of sidecars: fork them, send requests, kill them.

`Forkserver.connect` -> `fork` -> `Sidecar.build` -> `transfer`,
`collective` -> `kill`. All on the asyncio loop of the session thread.
"""
