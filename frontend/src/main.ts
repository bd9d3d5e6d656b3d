// Every page's script: the theme's switch, copy buttons, what htmx needs, and the live run page where there is one.

import "./css/main.css";
import "htmx.org";
import { copyButtons } from "./copy";
import { themeSwitch } from "./theme";
import { presetHints } from "./preset";

themeSwitch(document);
copyButtons(document);
presetHints(document);

const page = document.querySelector<HTMLElement>("[data-live-run]");
if (page) void import("./run").then(({ runPage }) => runPage(page));
