// Places on the page, as URL fragments that can be shared: #replica/rollout/0, #sync/policy/12, #event/345.

export const to = (kind, ...names) => `#${[kind, ...names].map((one) => encodeURIComponent(one)).join("/").replaceAll("%2F", "/")}`;

/** The place of a track of the timeline. */
export function toTrack(track) {
  const [kind, ...rest] = track.split(" ");
  return kind === "run" ? to("run") : to(kind, rest.join(" "));
}

/** The place that a fragment names, or undefined. */
export function placeOf(fragment) {
  const [kind, ...parts] = fragment.replace(/^#/, "").split("/").map(decoded);
  if (!["replica", "group", "node", "channel", "sync", "event", "run"].includes(kind)) return undefined;
  if (kind === "sync") return { kind, channel: parts.slice(0, -1).join("/"), version: Number(parts.at(-1)) };
  if (kind === "event") return { kind, seq: Number(parts[0]) };
  return { kind, name: parts.join("/") };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function go(place) {
  if (location.hash !== place) location.hash = place;
}
