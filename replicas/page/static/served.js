// The lane below a channel's: which version was served when, and the candidate while it lasts.

import { h } from "./elements.js";
import { clock, some } from "./texts.js";
import { to } from "./places.js";

/** Return the lane of a channel; null for one without promotions, which serves each version. */
export function servedRow(model, { name, current, canary, follow }) {
  if (follow !== "promoted" && !model.spans(`channel ${name}`, "served").length) return null;
  const candidate = model.candidate(name);
  return h("div", { class: "lane", key: `served ${name}` },
    h("a", { class: "name", href: to("channel", name), title: `which version of ${name} is served` }, "served"),
    h("div", { class: "track", "data-lane": `served ${name}`, own: true, key: "track" }),
    h("span", { class: "meta" }, current ? `v${current}` : "none yet", candidate ? h("span", { class: "warn" }, ` v${candidate.number}${canary?.length ? ` on ${some(canary, 1)}` : ""}`) : null));
}

/** Draw what lies on that lane between two times; `x`: the place of a time. */
export function servedStrips(model, channel, first, last, x) {
  const now = model.now;
  const strip = (key, version, start, end, y, kind, about) => {
    const [from, until] = [x(start), x(end)];
    return h("g", { key, "data-to": to("sync", channel, version) },
      h("rect", { x: from, y, width: Math.max(until - from, 1), height: 10, class: kind }, h("title", null, about)),
      until - from > 7 * String(version).length + 8 ? h("text", { x: Math.max(from, 0) + 3, y: y + 8, class: kind === "underway" ? "gaptext" : "versiontext" }, String(version)) : null);
  };
  const spans = model.spans(`channel ${channel}`, "served").filter((one) => (one.end ?? now) >= first && one.start <= last);
  const candidate = model.candidate(channel);
  const canary = model.doc.channels[channel]?.canary ?? [];
  return [...spans.map((one) => strip(one.key, one.version, one.start, one.end ?? now, 15, `version v${one.version % 2}`, `version ${one.version} of ${channel} is served from ${clock(one.start)}`)),
    candidate?.at ? strip("candidate", candidate.number, candidate.at, now, 3, "underway", `version ${candidate.number} is the candidate${canary.length ? `, on ${canary.join(", ")}` : ""}`) : null];
}
