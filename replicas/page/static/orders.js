// Orders to the run. Each describes its effect before the operator confirms it, and needs an operator's token.
// The page asks for the token when needed, and keeps it only in this object: never in a URL or browser storage.

import { draw, h } from "./elements.js";
import { count, some } from "./texts.js";

export class Orders {
  #token = "";
  #given = null; // resolves the question for a token

  constructor(model, dialog, changed) {
    Object.assign(this, { model, dialog, changed });
    dialog.addEventListener("close", () => this.#given?.(false));
  }

  get locked() {
    return !this.#token;
  }

  forget() {
    this.#token = "";
    this.changed();
  }

  /** Fetch with the token; ask for it first if there is none. Throws an error with the server's text. */
  async fetch(path, options = {}) {
    if (this.locked && !(await this.askToken())) throw new Error("not done: this needs an operator's token");
    const headers = { ...options.headers, Authorization: `Bearer ${this.#token}` };
    if (options.method === "POST" && this.model.doc.run.run) headers["Replicas-Run"] = encodeURIComponent(this.model.doc.run.run);
    const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
    if (response.status === 401) {
      this.forget();
      throw new Error((await said(response)) || "this token is not valid");
    }
    if (!response.ok) throw new Error((await said(response)) || `the answer was ${response.status}`);
    return response;
  }

  /** Ask for the token; resolve to true if it was given. */
  askToken(why = "An operator's token is needed: `replicas token --role operator` prints it on the run's machine.") {
    return new Promise((resolve) => {
      const done = (given) => {
        this.#given = null;
        if (this.dialog.open) this.dialog.close();
        resolve(given);
        this.changed();
      };
      this.#given = done;
      const take = (event) => {
        event.preventDefault();
        const value = this.dialog.querySelector("input").value.trim();
        if (!value) return;
        this.#token = value.replace(/^R1[^.]*\./, ""); // the name of the port's key is for clients that check it
        done(true);
      };
      this.#show("Operator's token", h("form", { onsubmit: take, key: "token" }, h("p", null, why),
        h("p", { class: "muted" }, "It is kept in this page's memory only, until the page is closed."),
        h("label", null, "Token ", h("input", { type: "password", autocomplete: "off", spellcheck: "false", name: "token", required: true })),
        this.#buttons("Use it")));
    });
  }

  /** Describe what an order does; send it if the operator confirms. */
  give(order) {
    const state = { value: order.number?.now, busy: false, said: "", failed: false };
    const show = () => this.#show(order.title, h("form", { key: order.title, onsubmit: (event) => {
      event.preventDefault();
      if (state.done) this.dialog.close();
      else this.#send(order, state, show);
    } },
    order.number ? h("label", null, `${order.number.name} `, h("input", {
      type: "number", min: 0, max: order.number.most, value: String(state.value), name: "number", required: true, disabled: state.busy || state.done, oninput: (event) => {
        state.value = event.target.valueAsNumber;
        show();
      },
    })) : null,
    h("p", { class: "says" }, order.says(state.value)),
    state.said ? h("p", { class: state.failed ? "bad" : "good", role: "alert" }, state.said) : null,
    state.done ? h("p", { class: "buttons" }, h("button", { type: "submit", class: "main" }, "Close")) : this.#buttons(state.busy ? "Under way…" : order.verb, order.danger, state.busy)));
    show();
  }

  async #send(order, state, show) {
    Object.assign(state, { busy: true, said: "", failed: false });
    try {
      if (this.locked && !(await this.askToken())) {
        Object.assign(state, { busy: false, said: "Not done: no token was given.", failed: true });
        return show();
      }
      show();
      const response = await this.fetch(order.path, { method: "POST", body: JSON.stringify(order.body(state.value)) });
      const answer = JSON.parse((await response.text()).trim());
      if (answer.error) throw new Error(problem(answer.error));
      Object.assign(state, { done: true, said: answer.done ? order.did?.(answer.result) ?? "Done." : "Started." });
    } catch (error) {
      Object.assign(state, { said: error.message, failed: true });
    }
    state.busy = false;
    show();
    return undefined;
  }

  #show(title, form) {
    draw(this.dialog, h("h2", { id: "asked" }, title), form);
    if (!this.dialog.open) this.dialog.showModal();
    if (!this.dialog.querySelector("form").contains(document.activeElement)) this.dialog.querySelector("input, button.main")?.focus();
  }

  #buttons(verb, danger = false, busy = false) {
    return h("p", { class: "buttons" }, h("button", { type: "button", onclick: () => this.dialog.close() }, "Cancel"),
      h("button", { type: "submit", class: danger ? "main danger" : "main", disabled: busy }, verb));
  }
}

async function said(response) {
  try {
    const answer = JSON.parse((await response.text()).trim());
    return answer.error?.message ? problem(answer.error) : String(answer.error ?? "");
  } catch {
    return "";
  }
}

const problem = (error) => [error.message, ...(error.problems ?? []), error.hint].filter(Boolean).join(" — ");

// ------------------------------------------------------------ the orders

const names = (replicas) => some(replicas.map((one) => one.name), 4);

export function scaleOrder(model, group) {
  const now = model.replicasOf(group.name);
  return {
    title: `Scale ${group.name}`, verb: "Scale", path: "/scale", number: { name: "replicas", now: now.length, most: 10000 },
    body: (wanted) => ({ group: group.name, replicas: wanted }),
    says: (wanted) => {
      if (!Number.isInteger(wanted) || wanted < 0) return "Enter the new number of replicas.";
      if (wanted === now.length) return `${group.name} has ${count(wanted, "replica")}: nothing changes.`;
      if (wanted > now.length) return `${group.name} goes from ${now.length} to ${wanted}: ${count(wanted - now.length, "replica")} of ${count(group.world_size, "rank")} start, where there is room. The size stays until the next scale, or a reload that changes it.`;
      const ends = now.slice(wanted).reverse();
      return `${group.name} goes from ${now.length} to ${wanted}: ${names(ends)} may finish a sync, then end${ends.length === 1 ? "s" : ""}.`;
    },
    did: () => "Done: the group has its new size; new replicas are starting.",
  };
}

export function restartOrder(model, target, { rolling = false } = {}) {
  const replica = model.doc.replicas[target];
  const all = model.replicasOf(target);
  return {
    title: `Restart ${target}${rolling ? ", a few at a time" : ""}`, verb: "Restart", path: "/restart", body: () => ({ target, rolling }),
    says: () => (replica ? `${target} may finish a sync, is ended, and starts again as generation ${replica.generation + 1}. It is not ready until it has loaded the newest version. No restart budget is spent.`
      : rolling ? `All ${count(all.length, "replica")} of ${target} are restarted, only max_unavailable at a time, each ready before the next. No restart budget is spent.`
        : `All ${count(all.length, "replica")} of ${target} end at once after their sync, and start again: the group is not ready meanwhile. No restart budget is spent.`),
    did: () => (rolling ? "Done: all are restarted, and ready." : "Done: the next generation is starting."),
  };
}

export function drainOrder(model, target) {
  const replica = model.doc.replicas[target];
  const all = model.replicasOf(target);
  return {
    title: `Drain ${target}`, verb: "Drain", danger: true, path: "/drain", body: () => ({ target }),
    says: () => `${replica ? `${target} may finish a sync, then gets SIGTERM, then SIGKILL. It stays stopped` : `All ${count(all.length, "replica")} of ${target} may finish a sync, then get SIGTERM, then SIGKILL. They stay stopped`} until restarted.`,
    did: () => "Done: all its processes have ended.",
  };
}

export const drainRunOrder = (model) => ({
  title: "Drain the whole run", verb: "End the run", danger: true, path: "/drain", body: () => ({}),
  says: () => `All ${count(Object.keys(model.doc.replicas).length, "replica")} end after their sync, dependent groups first. Then the run is over, and its supervisor and this page end.`,
  did: () => "The drain has begun.",
});

export function nodeOrder(model, node) {
  const undo = node.state === "draining";
  const has = node.replicas ?? [];
  return {
    title: undo ? `Allow replicas on ${node.name} again` : `Drain node ${node.name}`, verb: undo ? "Allow replicas" : "Drain", danger: !undo, path: "/drain",
    body: () => ({ node: node.name, undo }),
    says: () => (undo ? `Replicas may start on ${node.name} again; its present ones stay.`
      : `${has.length ? `${some(has, 4)} may finish a sync, and start${has.length === 1 ? "s" : ""} on other nodes` : "It has no replicas"}; replicas that fit nowhere else wait. No budget is spent. ${node.local ? "" : "Its agent ends then."}`),
  };
}

export function resetOrder(model, target) {
  const failed = Object.values(model.doc.replicas).filter((one) => (!target || one.group === target || one.name === target) && ["failed", "backoff"].includes(one.state));
  return {
    title: target ? `Reset ${target}` : "Reset failed replicas", verb: "Reset", path: "/reset-failed", body: () => (target ? { target } : {}),
    says: () => `${failed.length ? `${names(failed)} start${failed.length === 1 ? "s" : ""} again immediately` : "No replicas have failed or wait, so none start"}, and restart budgets are full again. Use it when the cause is fixed.`,
    did: (result) => (result?.length ? `Starting again: ${some(result, 6)}.` : "No replicas had failed; restart budgets are full."),
  };
}

const STEERING = {
  promote: { verb: "Promote", does: (name, number) => `All targets of ${name} load version ${number}, which they hold already.` },
  reject: { verb: "Reject", danger: true, does: (name, number) => `Version ${number} is never served. Replicas that have loaded it go back to what the others serve, as a new version.` },
  rollback: { verb: "Roll back", danger: true, does: (name, number) => `The content of version ${number} is served again, as a new version of ${name}. Publishes that have begun end first; a candidate is rejected.` },
  hold: { verb: "Hold", does: (name, number) => `The content of version ${number} is kept for 10 minutes while newer versions come.` },
};

export function versionOrder(kind, channel, number) {
  const { verb, danger, does } = STEERING[kind];
  const version = String(number);
  return {
    title: `${verb}: version ${number} of ${channel}`, verb, danger, path: `/${kind}`, says: () => does(channel, number),
    body: () => ({ channel, ...(kind === "rollback" ? { to: version } : { version }), ...(kind === "hold" ? { seconds: 600 } : {}) }),
    did: (result) => (kind === "hold" ? `Lease ${result.name} keeps it.` : kind === "reject" ? "It is rejected." : `Version ${result.version} is served.`),
  };
}

export const reloadOrder = () => ({
  title: "Reload the config", verb: "Reload", path: "/reload", body: () => ({}),
  says: () => "The supervisor reads its config file again. New groups start, removed ones drain, groups whose processes would start differently restart, a few replicas at a time; all others continue. An invalid config changes nothing.",
  did: (result) => ["changed", "added", "removed"].filter((one) => result?.[one]?.length).map((one) => `${one}: ${result[one].join(", ")}`).join("; ") || "Reloaded: no changes.",
});
