"use strict";
(() => {
  const tip = document.getElementById("tip");
  const place = (event) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
  };

  // Switches set data-<for> on the nearest element that has it, else on the root.
  for (const group of document.querySelectorAll(".switch")) {
    const key = group.dataset.for;
    const target = group.closest(`[data-${key}]`) || document.documentElement;
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const show = () => {
      const now = target.dataset[key] || (key === "theme" ? (dark ? "dark" : "light") : "");
      for (const button of group.children) button.setAttribute("aria-pressed", button.dataset.to === now);
    };
    group.addEventListener("click", (event) => {
      const to = event.target.dataset.to;
      if (!to) return;
      target.dataset[key] = to;
      if (key === "prompts") for (const d of target.querySelectorAll(".prompt")) d.open = to === "on";
      show();
    });
    show();
  }

  // Charts of lines: the values under the pointer.
  for (const figure of document.querySelectorAll("figure")) {
    const data = figure.querySelector(':scope > script[type="application/json"]');
    if (!data) continue;
    const { y, lines } = JSON.parse(data.textContent);
    for (const svg of figure.querySelectorAll("svg[data-x]")) {
      const [low, high, start, end] = svg.dataset.x.split(",").map(Number);
      const kind = svg.classList.contains("by-time") ? "times" : "steps";
      const guide = svg.querySelector(".guide");
      const cross = guide.firstChild;
      const pixel = (x) => start + ((x - low) / (high - low)) * (end - start);
      const height = (v) => y[2] + ((v - y[0]) / (y[1] - y[0])) * (y[3] - y[2]);
      const nearest = (line, x) => {
        let best = -1;
        line[kind].forEach((p, i) => {
          if (p === null || line.values[i] === null) return;
          if (best < 0 || Math.abs(p - x) < Math.abs(line[kind][best] - x)) best = i;
        });
        return best;
      };
      svg.addEventListener("pointermove", (event) => {
        const box = svg.getBoundingClientRect();
        const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
        const x = low + ((at - start) / (end - start)) * (high - low);
        while (guide.childNodes.length > 1) guide.lastChild.remove();
        tip.replaceChildren();
        let where = null;
        for (const line of lines) {
          const i = nearest(line, x);
          if (i < 0) continue;
          where ??= i === -1 ? null : { line, i };
          const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
          dot.setAttribute("class", `dot ${line.color}`);
          dot.setAttribute("r", 4);
          dot.setAttribute("cx", pixel(line[kind][i]));
          dot.setAttribute("cy", height(line.values[i]));
          guide.append(dot);
          const mark = document.createElement("i");
          mark.className = line.color;
          const other = line.steps[i] === where.line.steps[where.i] ? "" : ` (step ${line.steps[i]})`;
          tip.append("\n", mark, `${line.name} ${line.text[i]}${other}`);
        }
        if (!where) return;
        const seconds = where.line.times[where.i];
        const time = seconds === null || seconds === undefined ? "" : ` · ${Math.round(seconds)} s`;
        tip.prepend(`step ${where.line.steps[where.i]}${time}`);
        const px = pixel(where.line[kind][where.i]);
        cross.setAttribute("x1", px);
        cross.setAttribute("x2", px);
        guide.removeAttribute("hidden");
        place(event);
      });
      svg.addEventListener("pointerleave", () => {
        guide.setAttribute("hidden", "");
        tip.hidden = true;
      });
    }
  }

  // Everything else that explains itself.
  document.addEventListener("pointermove", (event) => {
    const target = event.target.closest?.("[data-tip]");
    if (target) {
      tip.textContent = target.dataset.tip;
      place(event);
    } else if (!event.target.closest?.("svg[data-x]")) {
      tip.hidden = true;
    }
  });
})();
