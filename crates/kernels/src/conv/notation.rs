//! The two text forms of a convolution problem: benchdnn's notation (canonical) and the article's.

use std::fmt;
use std::str::FromStr;

use super::problem::{ConvAxis, ConvProblem, ConvSpec, ConvTypes};
use crate::{Error, MemoryFormat, Result};

/// Prints benchdnn's notation, for example `mb32ic64ih56iw56oc64oh56ow56kh3kw3sh1sw1ph1pw1`.
///
/// Groups and dilation are left out where they are 1. Element type and memory format are not part of the notation.
impl fmt::Display for ConvProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (h, w) = (&self.height, &self.width);
        if self.groups != 1 {
            write!(f, "g{}", self.groups)?;
        }
        write!(f, "mb{}ic{}ih{}iw{}", self.batch, self.in_channels, h.input, w.input)?;
        write!(f, "oc{}oh{}ow{}kh{}kw{}", self.out_channels, h.output(), w.output(), h.kernel, w.kernel)?;
        write!(f, "sh{}sw{}ph{}pw{}", h.stride, w.stride, h.pad_before, w.pad_before)?;
        if (h.dilation, w.dilation) != (1, 1) {
            write!(f, "dh{}dw{}", h.dilation - 1, w.dilation - 1)?;
        }
        Ok(())
    }
}

/// Reads either form, as an f32 problem in contiguous format (change them with [`ConvProblem::with`]).
///
/// benchdnn: keys `g mb ic ih iw oc oh ow kh kw sh sw ph pw dh dw` with numbers, in any order, `_` between them
/// allowed, and an optional name `n"..."` at the end. Dilation is zero-based (`dh0` is dense). An omitted height or
/// width follows the other one; omitted stride is 1, padding and dilation 0, groups 1, and `mb` 2 as in benchdnn.
/// If `oh` or `ow` is given, it determines the padding after the input; otherwise that equals the padding before it.
///
/// The article's: `i128x36x12,k64x6x3,b256`, input channels x width x height, kernels x width x height, batch; parts are
/// separated by `,` or `_`; stride 1, no padding; without `b` the batch is 1.
impl FromStr for ConvProblem {
    type Err = Error;

    fn from_str(text: &str) -> Result<ConvProblem> {
        let trimmed = text.trim();
        let spec = if is_article(trimmed) { parse_article(trimmed) } else { parse_benchdnn(trimmed) };
        let spec = spec.map_err(|reason| Error::Notation { text: shorten(text), reason })?;
        ConvProblem::new(spec)
            .map_err(|error| Error::Notation { text: shorten(text), reason: error.to_string() })
    }
}

/// Reads a suite: one problem a line, `#` starts a comment, blank lines are skipped.
///
/// # Errors
/// The first line that is not a valid problem, with its number.
pub fn parse_suite(text: &str) -> Result<Vec<ConvProblem>> {
    let mut problems = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        problems.push(line.parse().map_err(|error| match error {
            Error::Notation { text, reason } => {
                Error::Notation { text, reason: format!("line {}: {reason}", index + 1) }
            }
            other => other,
        })?);
    }
    Ok(problems)
}

fn shorten(text: &str) -> String {
    if text.chars().count() <= 120 {
        text.into()
    } else {
        text.chars().take(117).chain("...".chars()).collect()
    }
}

fn number(digits: &str, key: &str) -> std::result::Result<usize, String> {
    if digits.is_empty() {
        return Err(format!("no number after `{key}`"));
    }
    digits.parse().map_err(|_| format!("the number after `{key}` is too large: {}", shorten(digits)))
}

fn is_article(text: &str) -> bool {
    text.strip_prefix('i').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

fn parse_article(text: &str) -> std::result::Result<ConvSpec, String> {
    let form = "expected iCxWxH,kKxWxH[,bN], for example i128x36x12,k64x6x3,b256";
    let (mut input, mut kernel, mut batch) = (None, None, None);
    for part in text.split([',', '_']) {
        let (slot, key, rest) = match part.chars().next() {
            Some('i') => (&mut input, "i", &part[1..]),
            Some('k') => (&mut kernel, "k", &part[1..]),
            Some('b') => (&mut batch, "b", &part[1..]),
            _ => return Err(format!("{form}, found {part:?}")),
        };
        let sizes: Vec<usize> = rest
            .split('x')
            .map(|digits| match digits.bytes().all(|byte| byte.is_ascii_digit()) {
                true => number(digits, key),
                false => Err(format!("{form}, found {part:?}")),
            })
            .collect::<std::result::Result<_, _>>()?;
        if sizes.len() != if key == "b" { 1 } else { 3 } {
            return Err(format!("{form}, found {part:?}"));
        }
        if slot.replace(sizes).is_some() {
            return Err(format!("`{key}` is given twice"));
        }
    }
    let (Some(input), Some(kernel)) = (input, kernel) else { return Err(form.into()) };
    Ok(ConvSpec {
        batch: batch.map_or(1, |batch| batch[0]),
        in_channels: input[0],
        out_channels: kernel[0],
        groups: 1,
        height: ConvAxis::new(input[2], kernel[2]),
        width: ConvAxis::new(input[1], kernel[1]),
        types: ConvTypes::F32,
        format: MemoryFormat::Contiguous,
    })
}

/// Keys of benchdnn's notation; the height and width keys of a size are neighbours.
const KEYS: [&str; 16] =
    ["g", "mb", "ic", "oc", "ih", "iw", "oh", "ow", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw"];

fn parse_benchdnn(text: &str) -> std::result::Result<ConvSpec, String> {
    let mut values = [None::<usize>; KEYS.len()];
    let mut rest = text;
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('_') {
            rest = after;
            continue;
        }
        if rest.starts_with("n\"") || (rest.starts_with('n') && rest.len() < text.len()) {
            break; // a name closes the notation
        }
        let key_len = rest.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(rest.len());
        let (key, after) = rest.split_at(key_len);
        let Some(index) = KEYS.iter().position(|&known| known == key) else {
            let known = KEYS.join(" ");
            return Err(if ["id", "od", "kd", "sd", "pd", "dd"].contains(&key) {
                format!("`{key}` belongs to a 3-D convolution; only 2-D is supported")
            } else {
                let found: String = rest.chars().take(12).collect();
                format!("expected a key ({known}) at {found:?}")
            });
        };
        let digits_len = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let (digits, after) = after.split_at(digits_len);
        if values[index].replace(number(digits, key)?).is_some() {
            return Err(format!("`{key}` is given twice"));
        }
        rest = after;
    }
    let get = |key: &str| values[KEYS.iter().position(|&known| known == key).expect("a known key")];
    let required = |key: &str| get(key).ok_or_else(|| format!("`{key}` is missing"));
    let pair = |letter: char| {
        let (h, w) = (get(&format!("{letter}h")), get(&format!("{letter}w")));
        (h.or(w), w.or(h))
    };
    let ((ih, iw), (oh, ow), (kh, kw), (sh, sw), (ph, pw), (dh, dw)) =
        (pair('i'), pair('o'), pair('k'), pair('s'), pair('p'), pair('d'));
    let missing = |letter: char| format!("`{letter}h` and `{letter}w` are missing");
    // If only one of oh and ow is given, the other equals it, unless ih and iw are both given.
    let follows = |given: Option<usize>, this: &str, axis_given: bool| {
        get(this).or(if axis_given { None } else { given })
    };
    let oh = follows(oh, "oh", get("ih").is_some() && get("iw").is_some());
    let ow = follows(ow, "ow", get("ih").is_some() && get("iw").is_some());
    Ok(ConvSpec {
        batch: get("mb").unwrap_or(2),
        in_channels: required("ic")?,
        out_channels: required("oc")?,
        groups: get("g").unwrap_or(1),
        height: axis(
            "h",
            [ih.ok_or_else(|| missing('i'))?, kh.ok_or_else(|| missing('k'))?],
            oh,
            sh,
            ph,
            dh,
        )?,
        width: axis("w", [iw.ok_or_else(|| missing('i'))?, kw.ok_or_else(|| missing('k'))?], ow, sw, pw, dw)?,
        types: ConvTypes::F32,
        format: MemoryFormat::Contiguous,
    })
}

fn axis(
    name: &str,
    [input, kernel]: [usize; 2],
    output: Option<usize>,
    stride: Option<usize>,
    pad: Option<usize>,
    dilation: Option<usize>,
) -> std::result::Result<ConvAxis, String> {
    let overflow = || format!("the sizes of axis {name} overflow");
    let pad_before = pad.unwrap_or(0);
    let dilation = dilation.unwrap_or(0).checked_add(1).ok_or_else(overflow)?;
    let stride = stride.unwrap_or(1);
    let mut axis = ConvAxis { input, kernel, stride, pad_before, pad_after: pad_before, dilation };
    let Some(output) = output else { return Ok(axis) };
    if output == 0 || kernel == 0 || stride == 0 || input == 0 {
        return Err(format!("a size of axis {name} is 0"));
    }
    // The padding after the input that gives exactly this output: (o - 1) * stride + span - before - input.
    let read = (output - 1)
        .checked_mul(stride)
        .zip((kernel - 1).checked_mul(dilation))
        .and_then(|(steps, span)| steps.checked_add(span)?.checked_add(1))
        .ok_or_else(overflow)?;
    let before = pad_before.checked_add(input).ok_or_else(overflow)?;
    axis.pad_after = read.saturating_sub(before);
    if read > before.saturating_add(axis.pad_after) || axis.kernel_span() > before + axis.pad_after {
        return Err(overflow());
    }
    if axis.output() != output {
        return Err(format!(
            "`o{name}{output}` does not fit `i{name}{input}k{name}{kernel}s{name}{stride}p{name}{pad_before}`: \
             without padding after the input the output is {}",
            axis.output()
        ));
    }
    Ok(axis)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> ConvProblem {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn short_benchdnn_fills_in_the_rest() {
        let problem = parse("mb32ic64ih56oc64oh56kh3ph1");
        assert_eq!(problem.to_string(), "mb32ic64ih56iw56oc64oh56ow56kh3kw3sh1sw1ph1pw1");
        assert_eq!(parse("ic3iw8oc4kw3").input_shape(), [2, 3, 8, 8]);
        assert_eq!(parse("g2mb1_ic4ih9_oc6_kh3_dh1_n\"res2a\"").height.kernel_span(), 5);
    }

    #[test]
    fn the_output_decides_the_padding_after() {
        let given = parse("mb16ic3ih224oc64oh112kh7sh2ph3");
        assert_eq!((given.height.pad_before, given.height.pad_after), (3, 2));
        // PyTorch's symmetric padding of 3 asks for the same computation.
        let symmetric = parse("mb16ic3ih224oc64kh7sh2ph3");
        assert_eq!(given, symmetric);
        assert_eq!(parse("mb1ic1ih4oc1oh4kh2").height.pad_after, 1);
        assert_eq!(parse("mb1ic16ih14oc16oh1kh1sh14").height.output(), 1);
    }

    #[test]
    fn article_is_channels_width_height() {
        let article = parse("i128x36x12,k64x6x3,b256");
        assert_eq!(article, parse("mb256ic128ih12iw36oc64kh3kw6"));
        assert_eq!(parse("i128x36x12_k64x6x3_b256"), article);
        assert_eq!(parse("i1x4x4,k1x2x2").batch, 1);
    }

    #[test]
    fn mistakes_are_named() {
        let cases = [
            ("", "`ic` is missing"),
            ("mb1ic3oc4kh3", "`ih` and `iw` are missing"),
            ("mb1ic3ih8oc4kh", "no number after `kh`"),
            ("mb1ic3ih8oc4khx", "expected a key"),
            ("mb1ic3ih8oc4kh3zz4", "expected a key"),
            ("mb1mb2ic3ih8oc4kh3", "`mb` is given twice"),
            ("mb1ic3ih8oc4kh9", "larger than the padded input"),
            ("mb1ic3ih8oc4oh20kh3sh0", "is 0"),
            ("mb0ic3ih8oc4kh3", "batch must not be 0"),
            ("g3mb1ic4ih8oc4kh3", "3 groups do not divide 4"),
            ("mb1ic3ih8oc4oh5kh3", "does not fit"),
            ("mb1ic3id8ih8oc4kh3", "3-D"),
            ("mb1ic3ih99999999999999999999oc4kh3", "too large"),
            ("mb1ic3ih18446744073709551615oc4kh3ph9", "overflow"),
            ("mb99999999999ic99999999ih8oc4kh3", "too large"),
            ("mb1ic3ih8oc4kh3dh18446744073709551615", "overflow"),
            ("mb1ic3ih8oc4kh3sh18446744073709551615oh9", "overflow"),
            ("i3x4,k1x2x2", "expected iCxWxH"),
            ("i3x4x5", "expected iCxWxH"),
            ("i3x4x5,k1x1x1,k1x1x1", "given twice"),
        ];
        for (text, part) in cases {
            let error = text.parse::<ConvProblem>().expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let error = parse_suite("# suite\n\nmb1ic1ih4oc1kh2 # ok\nmb1ic").unwrap_err().to_string();
        assert!(error.contains("line 4"), "{error}");
    }
}
