"use strict";
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const night = matchMedia("(prefers-color-scheme: dark)");
  const charts = [];
  const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5];
  const SECONDS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400];

  const showTip = (event) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 16;
    const left = right + box.width > innerWidth ? event.clientX - box.width - 14 : right;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
  };
  addEventListener("pointermove", (event) => {
    const target = event.target.closest?.("[data-tip]");
    if (target) {
      tip.textContent = target.dataset.tip;
      showTip(event);
    } else if (!event.target.closest?.(".u-over")) {
      tip.hidden = true;
    }
  });

  const number = (value) => {
    const size = Math.abs(value);
    if (size > 0 && size < 5e-4) return Number(value.toPrecision(2)).toExponential();
    if (size >= 1e4) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
    return value.toLocaleString("en", { maximumSignificantDigits: 4 });
  };
  const tick = (place, step) => { // as many digits as tell neighbours apart: 0.99998, 1, 1.00002
    const size = Math.abs(place), digits = size ? Math.ceil(Math.log10(size / step) - 1e-9) + 1 : 1;
    if (digits <= 4 || size >= 1e4) return number(place);
    return place.toLocaleString("en", { maximumSignificantDigits: Math.min(21, digits) });
  };
  const clock = (seconds) => {
    if (seconds < 60) return `${Math.round(seconds)} s`;
    const parts = [seconds / 3600, (seconds / 60) % 60, seconds % 60];
    return parts.map((part) => String(Math.floor(part)).padStart(2, "0")).join(":").replace(/^00:/, "");
  };
  const style = (element, name) => () => getComputedStyle(element)[name]; // asked at each drawing: themes change

  // Draws one chart with uPlot: a faint line of values below a bold one of their running mean, or
  // bars on one another.
  const draw = (figure) => {
    const { lines, low, high, top, unit, stacked } = JSON.parse(figure.querySelector("script").textContent);
    const box = figure.querySelector(".plot");
    const keys = figure.querySelectorAll(".legend i");
    const known = lines.some((line) => line.times.some((time) => time !== null));
    const by = root.dataset.axis === "times" && known && !stacked ? "times" : "steps";
    const series = [{}], tables = [], bands = [], shown = []; // shown: each line's series of exact values, for the tooltip

    const add = (i, values, options) => {
      const { [by]: places, color, dots } = lines[i];
      const kept = [...places.keys()].filter((k) => places[k] !== null);
      tables.push([kept.map((k) => places[k]), kept.map((k) => values[k])]);
      const single = values.filter((value) => value !== null).length === 1;
      const points = { show: dots || single, size: 7, width: 2, fill: style(figure, "backgroundColor") };
      shown[i] = series.push({ stroke: style(keys[i], "backgroundColor"), width: 2, points, ...options }) - 1;
    };
    for (let i = lines.length - 1; i >= 0; i--) { // the first line comes last, on top of the others
      const { values, means, band } = lines[i];
      if (band.length) { // lows and highs; the space between them is filled
        band.forEach((side) => add(i, side, { width: 0, points: { show: false } }));
        const fill = () => `color-mix(in srgb, ${style(keys[i], "backgroundColor")()} 16%, transparent)`;
        bands.push({ series: [series.length - 1, series.length - 2], fill });
      }
      if (stacked) {
        const sums = values.map((_, k) => lines.slice(0, i + 1).reduce((sum, line) => sum + line.values[k], 0));
        add(i, sums, { width: 0, fill: style(keys[i], "backgroundColor"), paths: uPlot.paths.bars({ size: [values.length > 60 ? 1 : 0.86, 60] }) });
      } else if (means) {
        add(i, means);
        add(i, values, { width: 1, alpha: 0.34 });
      } else {
        add(i, values);
      }
    }

    const range = (u, min, max) => {
      const least = Math.min(min, low ?? min);
      const most = Math.max(Math.min(max, top ?? max), high ?? least);
      const margin = most > least ? 0.06 * (most - least) : 0.1 * Math.abs(most) || 1;
      return [least === low ? least : least - margin, most + margin];
    };
    const hover = (u) => {
      if (!u.cursor.event || !u.over.matches(":hover")) return;
      tip.replaceChildren();
      let where = null;
      lines.forEach((line, i) => {
        const k = line[by].indexOf(u.data[0][u.cursor.idxs[shown[i]]]);
        if (k < 0) return;
        if (where === null) {
          where = line.steps[k];
          tip.append(`step ${where}`, line.times[k] === null ? "" : ` · ${clock(line.times[k])}`);
        }
        const mark = document.createElement("i");
        mark.className = line.color;
        const other = line.steps[k] === where ? "" : ` (step ${line.steps[k]})`;
        tip.append("\n", mark, `${line.name} ${number(line.values[k])} ${unit}${other}`);
      });
      if (where !== null) showTip(u.cursor.event);
    };
    const marks = (u) => { // a line where settings changed
      for (const [step, time] of JSON.parse(root.dataset.changes)) {
        const place = u.valToPos(by === "times" ? time ?? 0 : step + 0.5, "x", true);
        const { left, top, width, height } = u.bbox;
        if (place < left || place > left + width) continue;
        u.ctx.fillStyle = style(box, "color")();
        for (let y = top; y < top + height; y += 8) u.ctx.fillRect(place, y, 1, 4);
      }
    };
    const axis = { stroke: style(box, "color"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    return new uPlot({
      width: box.clientWidth,
      height: box.clientHeight,
      padding: [8, 12, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        hover: { skip: [null] },
        points: {
          size: (u, i) => (shown.includes(i) && !stacked ? 8 : 0),
          fill: (u, i) => u.series[i].stroke(u, i),
        },
        sync: { key: by, scales: ["x", null] },
      },
      scales: {
        x: { time: false, range: (u, min, max) => (stacked || min === max ? [min - 0.5, max + 0.5] : [min, max]) },
        y: { range },
      },
      axes: [
        {
          ...axis, size: 22, gap: 4, grid: { show: false },
          label: by === "times" ? "wall time" : "step", labelFont: axis.font, labelSize: 14, labelGap: 0,
          incrs: by === "times" ? SECONDS : STEPS,
          values: (u, places) => places.map((place) => (by === "times" ? clock(place) : place)),
        },
        {
          ...axis, gap: 6, space: 26, grid: { stroke: "rgb(128 128 128 / .14)", width: 1 },
          size: (u, texts) => Math.max(46, 14 + 6.5 * Math.max(0, ...(texts ?? []).map((text) => text.length))),
          values: (u, places, index, space, step) => places.map((place) => tick(place, step)),
        },
      ],
      series,
      bands,
      hooks: { setCursor: [hover], draw: [marks] },
    }, uPlot.join(tables), box);
  };
  const redraw = () => {
    charts.splice(0).forEach((chart) => chart.destroy());
    for (const box of document.querySelectorAll(".plot")) charts.push(draw(box.parentElement));
  };

  // Switches set data-<for> on the nearest element that has it, else on the root.
  for (const group of document.querySelectorAll(".switch")) {
    const key = group.dataset.for;
    const target = group.closest(`[data-${key}]`) || root;
    const show = () => {
      const now = target.dataset[key] || (night.matches ? "dark" : "light");
      for (const button of group.children) button.setAttribute("aria-pressed", button.dataset.to === now);
    };
    group.addEventListener("click", (event) => {
      if (!event.target.dataset.to) return;
      target.dataset[key] = event.target.dataset.to;
      for (const prompt of target.querySelectorAll(".prompt")) prompt.open = target.dataset.prompts === "on";
      if (target === root) redraw();
      show();
    });
    show();
  }
  addEventListener("resize", () => {
    for (const chart of charts) {
      const { clientWidth, clientHeight } = chart.root.parentElement;
      chart.setSize({ width: clientWidth, height: clientHeight });
    }
  });
  for (const [name, scheme] of [["beforeprint", "light"], ["afterprint", ""]]) {
    addEventListener(name, () => {
      root.style.colorScheme = scheme;
      redraw();
    });
  }
  night.addEventListener("change", redraw);
  redraw();
})();
