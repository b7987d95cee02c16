// Runs in a page that holds a report in frames of several widths, and writes what is wrong with them into #findings.

// A colour as [red, green, blue, opacity].
function colour(text) {
  const parts = (text.match(/[\d.]+/g) || []).map(Number);
  return text === "transparent" || parts.length < 3 ? [0, 0, 0, 0] : [...parts.slice(0, 3), parts[3] ?? 1];
}

function over(above, opacity, below) {
  const share = above[3] * opacity;
  return [0, 1, 2].map((i) => share * above[i] + (1 - share) * below[i]);
}

// WCAG's contrast of two opaque colours.
function contrast(a, b) {
  const light = (colour) => {
    const [red, green, blue] = colour.map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const [more, less] = [light(a), light(b)].sort((x, y) => y - x);
  return (more + 0.05) / (less + 0.05);
}

function check(frame) {
  const view = frame.contentWindow;
  const page = view.document;
  const findings = [];
  page.querySelectorAll("details").forEach((details) => (details.open = true));
  const style = (element) => view.getComputedStyle(element);
  const name = (element) =>
    `<${element.tagName} class="${element.getAttribute("class") ?? ""}"> ${element.textContent.trim().slice(0, 40)}`;
  const find = (what, element) => findings.push(element ? `${what}: ${name(element)}` : what);
  // The element itself first.
  const ancestors = (element) => {
    const all = [];
    for (let at = element; at; at = at.parentElement) all.push(at);
    return all;
  };
  const opacity = (element) => ancestors(element).reduce((product, at) => product * Number(style(at).opacity), 1);
  const ground = (element) => {
    const painted = ancestors(element).find((at) => colour(style(at).backgroundColor)[3] > 0);
    return painted ? colour(style(painted).backgroundColor).slice(0, 3) : [255, 255, 255];
  };
  const shown = (element) =>
    style(element).visibility !== "hidden" && ancestors(element).every((at) => style(at).display !== "none");

  const root = page.documentElement;
  if (!(root.scrollWidth <= view.innerWidth)) find(`the page is ${root.scrollWidth} wide in ${view.innerWidth}`);
  const own = [...page.querySelectorAll("body *")].filter((element) => shown(element) && !element.closest("title"));
  if (own.length < 10) find("the page is empty");

  for (const element of own) {
    const box = element.getBoundingClientRect();
    const scrolled = ancestors(element.parentElement).some((at) => ["auto", "scroll"].includes(style(at).overflowX));
    if (element.scrollWidth > element.clientWidth + 1 && ["auto", "scroll"].includes(style(element).overflowX))
      find(`shows ${element.clientWidth} of ${element.scrollWidth} pixels`, element);
    if (!scrolled && box.right > view.innerWidth + 0.5) find(`ends at ${box.right} of ${view.innerWidth}`, element);

    const says = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (says) {
      const letters = element.closest("svg") ? style(element).fill : style(element).color;
      const found = contrast(over(colour(letters), opacity(element), ground(element)), ground(element));
      if (!(found >= 4.5)) find(`letters with a contrast of ${found.toFixed(2)}`, element);
    }
    // The samples of a legend.
    if (element.tagName === "I") {
      const below = ground(element.parentElement);
      const found = contrast(over(colour(style(element).backgroundColor), opacity(element), below), below);
      if (!(found >= 3)) find(`a sample with a contrast of ${found.toFixed(2)}`, element);
    }
  }

  for (const svg of page.querySelectorAll("svg")) {
    if (!shown(svg)) continue;
    const frame = svg.getBoundingClientRect();
    for (const shape of svg.querySelectorAll("path, rect, circle, ellipse, line, polyline, polygon")) {
      const { fill, stroke, strokeWidth, fillOpacity, strokeOpacity } = style(shape);
      const paints = [];
      if (fill !== "none") paints.push([fill, Number(fillOpacity)]);
      if (stroke !== "none" && parseFloat(strokeWidth) > 0) paints.push([stroke, Number(strokeOpacity)]);
      if (paints.length === 0) find("a shape that nothing paints", shape);
      // What no rule of the page speaks of is black, in the dark too.
      if (paints.some(([paint]) => colour(paint).slice(0, 3).every((part) => part === 0))) find("a black shape", shape);
      // Grid lines and the space below a line only support what is drawn; a cut lies on its bar; the shade of a square in a matrix
      // is its value, which numbers say too.
      if (shape.matches(".grid, .area, .cut, .right, .wrong")) continue;
      const best = Math.max(
        ...paints.map(([paint, share]) =>
          contrast(over(colour(paint), share * opacity(shape), ground(svg)), ground(svg))));
      if (!(best >= 3)) find(`a shape with a contrast of ${best.toFixed(2)}`, shape);
      const box = shape.getBoundingClientRect();
      const inside = box.left >= frame.left - 2 && box.right <= frame.right + 2 && box.top >= frame.top - 2
        && box.bottom <= frame.bottom + 2;
      if (!inside) find("a shape beyond the drawing", shape);
    }
    const texts = [...svg.querySelectorAll("text")].filter(shown);
    const boxes = texts.map((text) => text.getBoundingClientRect());
    texts.forEach((text, index) => {
      const box = boxes[index];
      // Letters are placed by their own box, which is taller than they are.
      const inside = box.left >= frame.left - 0.5 && box.right <= frame.right + 0.5 && box.top >= frame.top - 3
        && box.bottom <= frame.bottom + 3;
      if (!inside) find(`letters beyond the drawing, ${box.left - frame.left} to ${box.right - frame.left}`, text);
      const size = parseFloat(style(text).fontSize) * (frame.width / svg.viewBox.baseVal.width);
      if (!(size >= 9)) find(`letters of ${size} pixels`, text);
      for (let other = 0; other < index; other++) {
        const across = Math.min(box.right, boxes[other].right) - Math.max(box.left, boxes[other].left);
        const along = Math.min(box.bottom, boxes[other].bottom) - Math.max(box.top, boxes[other].top);
        if (across > 0 && along > 0.4 * box.height) find(`letters over ${name(texts[other])}`, text);
      }
    });
  }
  const dark = view.matchMedia("(prefers-color-scheme: dark)").matches;
  return { width: view.innerWidth, dark, elements: own.length, findings };
}

addEventListener("load", () => {
  const frames = [...document.querySelectorAll("iframe")];
  // Percent signs, so that no markup is in the way.
  document.querySelector("#findings").textContent = encodeURIComponent(JSON.stringify(frames.map(check)));
});
