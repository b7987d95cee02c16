//! Makes text from files safe for terminals and pages: control characters are shown and have no effect.

use std::fmt::{self, Display, Write};

/// Text of this many characters or more is cut, so that messages stay readable.
const MOST: usize = 4096;

/// Shows a value with its control characters written out. See [`escaped`].
#[derive(Debug, Clone, Copy)]
pub struct Escaped<T> {
    value: T,
    lines: bool,
}

/// Shows text from a file, or a file's name, on one line. Line ends, other control characters (C0, C1, DEL) and characters
/// that are invisible or change the direction of text are written as `\n` or `\u{1b}`. Text of 4096 or more characters is
/// cut after 4095, followed by `...`.
pub fn escaped<T: Display>(value: T) -> Escaped<T> {
    Escaped { value, lines: false }
}

/// As [`escaped`], for text of several lines and any length: keeps line ends and tabs.
pub fn escaped_lines<T: Display>(value: T) -> Escaped<T> {
    Escaped { value, lines: true }
}

impl<T: Display> Display for Escaped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = if self.lines { usize::MAX } else { MOST };
        write!(Filter { out: f, lines: self.lines, left }, "{}", self.value)
    }
}

/// Writes text to `out`, escaped.
struct Filter<'a, 'b> {
    out: &'a mut fmt::Formatter<'b>,
    lines: bool,
    /// Characters that still fit.
    left: usize,
}

impl Write for Filter<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            match self.left {
                0 => return Ok(()),
                1 if !self.lines => self.out.write_str("...")?,
                _ if self.lines && matches!(character, '\n' | '\t') => self.out.write_char(character)?,
                _ if is_plain(character) => self.out.write_char(character)?,
                _ if matches!(character, '\n' | '\r' | '\t') => {
                    write!(self.out, "{}", character.escape_default())?;
                }
                _ => write!(self.out, "{}", character.escape_unicode())?,
            }
            self.left -= 1;
        }
        Ok(())
    }
}

/// Whether a character is shown as itself and does not change the text around it.
fn is_plain(character: char) -> bool {
    // Besides the controls (Cc), the format characters (Cf) of Unicode 17, and the separators of lines and paragraphs.
    let hidden = matches!(character,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}'..='\u{891}' | '\u{8e2}'
        | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}'
        | '\u{1d173}'..='\u{1d17a}' | '\u{e0001}' | '\u{e0020}'..='\u{e007f}');
    !character.is_control() && !hidden
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_are_written_out() {
        for (text, shown) in [
            ("plain, Größe, 漢字, \\ and 🙂", "plain, Größe, 漢字, \\ and 🙂"),
            ("\x1b]0;x\x07", "\\u{1b}]0;x\\u{7}"),
            ("\x1b[2J", "\\u{1b}[2J"),
            ("a\r\nb\tc", "a\\r\\nb\\tc"),
            ("\u{7f}\u{85}\u{9b}2J", "\\u{7f}\\u{85}\\u{9b}2J"),
            ("\u{202e}gpj\u{2066}\u{200f}\u{feff}", "\\u{202e}gpj\\u{2066}\\u{200f}\\u{feff}"),
            ("a\u{2028}b\u{2029}", "a\\u{2028}b\\u{2029}"),
        ] {
            assert_eq!(escaped(text).to_string(), shown);
        }
        let every = (0..=u32::from(char::MAX)).filter_map(char::from_u32).collect::<Vec<_>>();
        let shown = every.chunks(1000).map(|part| escaped(part.iter().collect::<String>()).to_string());
        assert!(shown.into_iter().all(|text| text.chars().all(is_plain)));
    }

    #[test]
    fn lines_may_be_kept() {
        assert_eq!(escaped_lines("a\n\tb\x1b\r").to_string(), "a\n\tb\\u{1b}\\r");
        let long = "x".repeat(10_000);
        assert_eq!(escaped_lines(&long).to_string(), long);
    }

    #[test]
    fn long_text_is_cut() {
        let text = escaped("x".repeat(10_000)).to_string();
        assert_eq!((text.len(), text.ends_with("x...")), (MOST + 2, true));
        assert_eq!(escaped("x".repeat(MOST - 1)).to_string().len(), MOST - 1);
    }
}
