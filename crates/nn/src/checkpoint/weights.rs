//! Loads pretrained weights by PyTorch's names: finds the state dict in a file, and what of it fits the model.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use convoke_files::{escaped, open_regular};
use safetensors::tensor::TensorView;

use super::numbers::{Conversion, Numbers, described, read_value};
use super::old_torch_file::{self, OldTorchFile};
use super::pickle::{self, Tensor, Unpickled};
use super::torch_file::{self, TorchFile, unsupported};
use super::{
    CheckpointError, Result, SHOWN, Value, damaged, failed, list, may_be_absent, model_values, set_model,
};
use crate::{Module, ModuleExt, State};

/// How [`load_weights`] fits a file to a model. By default everything must fit.
#[derive(Clone, Copy, Default)]
pub struct WeightOptions<'a> {
    /// The model may have another number of classes than the file: weight and bias of its last layer stay as they are if their
    /// shapes differ from the file's in the first dimension only.
    pub new_head: bool,
    /// Load what fits, and leave the rest of the model as it is.
    pub partial: bool,
    /// Where in the file the state dict lies, as keys with dots between them: `model_ema`. `None` finds it.
    pub state_dict: Option<&'a str>,
    /// The model's name for a name of the file. It gets names without what wrappers add, such as `module.`.
    pub rename: Option<&'a dyn Fn(&str) -> String>,
}

/// What [`load_weights`] has loaded, and what it has not; or why it has loaded nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LoadedWeights {
    /// How many of the model's tensors and counters fit.
    pub loaded: usize,
    /// Where in the file the state dict lies: `model`, or the empty text if it is the whole file.
    pub state_dict: String,
    /// What the file's names begin with and the model's do not: `backbone.`.
    pub prefix: String,
    /// What the model has and the file lacks.
    pub missing: Vec<String>,
    /// What the file has and the model lacks, by the file's names; no `aux_classifier`.
    pub unexpected: Vec<String>,
    /// What both have, in different shapes.
    pub other_shape: Vec<OtherShape>,
}

/// A tensor that a file and a model have in different shapes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OtherShape {
    /// The model's name for it.
    pub name: String,
    /// The file's shape.
    pub file: Vec<usize>,
    /// The model's shape.
    pub model: Vec<usize>,
}

impl std::fmt::Display for OtherShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of shape {:?}, the model's is {:?}", escaped(&self.name), self.file, self.model)
    }
}

impl std::fmt::Display for LoadedWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} fit", self.loaded)?;
        list(f, "missing", &self.missing)?;
        list(f, "unexpected", &self.unexpected)?;
        list(f, "in another shape", &self.other_shape)
    }
}

/// Loads a state dict that PyTorch saved, as `.pt`, `.pth` or `.safetensors`, into a model with the same names; or (feature `onnx`) the
/// parameters and statistics of a `.onnx` file.
///
/// The file's first bytes tell its format; only that of ONNX is told by its name. If it holds more than a state dict (`{"model": ...,
/// "epoch": 3}`), the state dict that fits best is taken; of several that fit alike, one named `state_dict`, `model_state_dict` or
/// `model`, and no moving average. What wrappers add to names (`module.`, `_orig_mod.`) is removed, and so is a prefix (`backbone.`) if
/// more than half of the model's names are then found. A model of blocks of a convolution and a batch norm, such as
/// [`resnet50`](crate::models::resnet50), also takes torchvision's names (`layer1.0.bn1.weight`). Numbers of any floating-point type are converted to the model's.
/// `num_batches_tracked` may be missing, and an `aux_classifier`, torchvision's auxiliary head for masks, is left out.
///
/// A file of PyTorch's holds a program, which is not run: only what describes tensors is understood.
///
/// # Errors
/// If the file is damaged, names anything else than tensors, or does not fit as the options demand; with
/// [`WeightOptions::partial`], if nothing fits or a tensor has another kind of numbers. The model is then unchanged.
pub fn load_weights(
    model: &(impl Module + ?Sized),
    file: &Path,
    options: &WeightOptions<'_>,
) -> Result<LoadedWeights> {
    model.check_all_initialized()?;
    let mut values = model_values(model);
    let demand = Demand { file, options, last_layer: last_layer(model) };
    let found = match format_of(file)? {
        Format::Torch(opened) => {
            let torch = Saved::open(file, opened)?;
            let pickle = torch.pickle()?;
            let unpickled = torch.unpickle(&pickle)?;
            let candidates = state_dicts(file, &unpickled, options.state_dict)?;
            let fit = demand.fit(&values, &candidates)?;
            read_torch(file, &torch, &unpickled, &fit, &mut values)?;
            fit.found
        }
        Format::Safetensors => {
            let bytes = super::read(file)?;
            let stored = super::open(file, &bytes)?;
            let mut views: Vec<(&str, TensorView<'_>)> = stored.iter().collect();
            views.sort_unstable_by_key(|(name, _)| *name);
            let candidates = demand.only(views.iter().map(|(name, view)| (*name, view.shape())))?;
            let fit = demand.fit(&values, &candidates)?;
            for (model, listed) in &fit.pairs {
                let (name, value) = &mut values[*model];
                let numbers = Numbers::of(&views[listed.place].1);
                *value = read_value(file, name, &numbers, value, Conversion::AnyFloat)?;
            }
            fit.found
        }
        #[cfg(feature = "onnx")]
        Format::Onnx => {
            let arrays = super::onnx_file::arrays(file)?;
            let candidates =
                demand.only(arrays.iter().map(|(name, array)| (name.as_str(), array.shape())))?;
            let fit = demand.fit(&values, &candidates).map_err(super::onnx_file::explained)?;
            for (model, listed) in &fit.pairs {
                let (name, value) = &mut values[*model];
                *value = super::onnx_file::value(file, name, &arrays[listed.place].1, value)?;
            }
            fit.found
        }
    };
    set_model(model, values.into_iter().map(|(_, value)| value).collect())?;
    Ok(found)
}

/// A file that PyTorch saved.
enum Saved {
    Archive(TorchFile),
    Old(OldTorchFile),
}

impl Saved {
    fn open(file: &Path, mut opened: File) -> Result<Saved> {
        let mut begin = [0; 2];
        opened.rewind().and_then(|()| opened.read_exact(&mut begin)).map_err(failed(file, "read"))?;
        match begin == torch_file::MAGIC {
            true => TorchFile::open(file, opened).map(Saved::Archive),
            false => OldTorchFile::open(file, opened).map(Saved::Old),
        }
    }

    /// The bytes of the pickle that names tensors.
    fn pickle(&self) -> Result<Cow<'_, [u8]>> {
        match self {
            Saved::Archive(archive) => archive.pickle().map(Cow::Owned),
            Saved::Old(old) => Ok(Cow::Borrowed(old.pickle())),
        }
    }

    /// What that pickle describes.
    fn unpickle<'a>(&self, bytes: &'a [u8]) -> Result<Unpickled<'a>> {
        match self {
            Saved::Archive(archive) => archive.unpickle(bytes),
            Saved::Old(old) => old.unpickle(bytes),
        }
    }

    /// The bytes of a storage.
    fn storage(&self, key: &str) -> Result<Vec<u8>> {
        match self {
            Saved::Archive(archive) => archive.storage(key),
            Saved::Old(old) => old.storage(key),
        }
    }
}

/// What a file is.
enum Format {
    Torch(File),
    Safetensors,
    #[cfg(feature = "onnx")]
    Onnx,
}

/// What a file is, by its first bytes; ONNX has none that tell it.
fn format_of(file: &Path) -> Result<Format> {
    let mut opened = open_regular(file).map_err(failed(file, "read"))?;
    let mut begin = Vec::new();
    opened.by_ref().take(512).read_to_end(&mut begin).map_err(failed(file, "read"))?;
    if begin.starts_with(torch_file::MAGIC) || old_torch_file::is_one(&begin) {
        return Ok(Format::Torch(opened));
    }
    // The header of safetensors is an object in JSON, behind its length.
    if begin.get(8) == Some(&b'{') {
        return Ok(Format::Safetensors);
    }
    let is_old = matches!(begin.as_slice(), [0x80, 2..=5, ..]) || begin.get(257..262) == Some(b"ustar");
    match file.extension().and_then(|extension| extension.to_str()) {
        #[cfg(feature = "onnx")]
        Some(extension) if extension.eq_ignore_ascii_case("onnx") => Ok(Format::Onnx),
        _ if is_old => Err(old_torch_file::older(file)),
        Some("safetensors") => Ok(Format::Safetensors),
        _ => Err(damaged(
            file,
            "neither a file of torch.save nor of safetensors: save the weights with torch.save(model.state_dict(), file)",
        )),
    }
}

/// The path of the model's last layer with parameters, by its own order.
pub(crate) fn last_layer(model: &(impl Module + ?Sized)) -> String {
    let state = model.named_state();
    let last = state.iter().rfind(|(_, state)| matches!(state, State::Parameter(_)));
    last.map_or(String::new(), |(name, _)| layer_of(name).to_owned())
}

/// The path of the layer that a parameter of this path belongs to.
pub(crate) fn layer_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(layer, _)| layer)
}

/// Longer names are refused, and longer keys are not followed. A model's have a tenth of this.
const LONGEST_NAME: usize = 512;
/// How many prefixes of a name are tried.
const MOST_PREFIXES: usize = 16;
/// How deep a state dict may lie within dictionaries.
const DEEPEST: usize = 8;

/// One tensor of a file.
struct Listed<'a> {
    name: &'a str,
    shape: &'a [usize],
    /// The place of the tensor among the file's tensors.
    place: usize,
}

/// A dictionary of a file that may be the state dict.
struct Candidate<'a> {
    /// The keys that lead to it.
    keys: Keys<'a>,
    tensors: Vec<Listed<'a>>,
}

/// At most [`DEEPEST`] keys.
type Keys<'a> = Vec<&'a str>;

/// The dictionaries that lie in a pickle, each once, the outer ones first, if they hold tensors.
fn state_dicts<'a>(
    file: &Path,
    unpickled: &'a Unpickled<'a>,
    wanted: Option<&str>,
) -> Result<Vec<Candidate<'a>>> {
    let pickle::Value::Dict(root) = unpickled.root else {
        return Err(unsupported(
            file,
            "it holds no dictionary of tensors: save one, with torch.save(model.state_dict(), file)",
        ));
    };
    let mut found: Vec<(usize, Keys<'a>)> = vec![(root, Vec::new())];
    let mut seen = HashSet::from([root]);
    let mut next = 0;
    while let Some((dict, keys)) = found.get(next).cloned() {
        next += 1;
        for (key, value) in &unpickled.dicts[dict] {
            if let pickle::Value::Dict(inner) = *value
                && keys.len() < DEEPEST
                && key.len() <= LONGEST_NAME
                && seen.insert(inner)
            {
                let keys = keys.iter().copied().chain([*key]).collect();
                found.push((inner, keys));
            }
        }
    }
    let mut candidates = Vec::new();
    for (dict, keys) in found {
        // Of two entries of one name, the later one counts.
        let mut places: HashMap<&str, usize> = HashMap::new();
        let mut tensors: Vec<Listed<'a>> = Vec::new();
        for &(name, value) in &unpickled.dicts[dict] {
            let pickle::Value::Tensor(place) = value else { continue };
            if name.len() > LONGEST_NAME {
                let reason =
                    format!("a tensor's name has {} bytes, at most {LONGEST_NAME} are read", name.len());
                return Err(unsupported(file, reason));
            }
            let listed = Listed { name, shape: &unpickled.tensors[place].shape, place };
            match places.entry(name) {
                Entry::Occupied(known) => tensors[*known.get()] = listed,
                Entry::Vacant(free) => {
                    free.insert(tensors.len());
                    tensors.push(listed);
                }
            }
        }
        if !tensors.is_empty() {
            candidates.push(Candidate { keys, tensors });
        }
    }
    chosen(file, candidates, wanted)
}

/// The candidates at the wanted place, if there is a wish.
fn chosen<'a>(
    file: &Path,
    mut candidates: Vec<Candidate<'a>>,
    wanted: Option<&str>,
) -> Result<Vec<Candidate<'a>>> {
    let places: Vec<String> =
        candidates.iter().take(SHOWN).map(|found| format!("{:?}", found.keys.join("."))).collect();
    if let Some(wanted) = wanted {
        candidates.retain(|found| found.keys.join(".") == wanted);
    }
    if candidates.is_empty() {
        let places = if places.is_empty() { "none".to_owned() } else { places.join(", ") };
        let wanted = wanted.map_or(String::new(), |wanted| format!(" at {wanted:?}"));
        return Err(unsupported(
            file,
            format!("there are no tensors by name{wanted}; there are at: {places}"),
        ));
    }
    Ok(candidates)
}

/// What must fit.
struct Demand<'a> {
    file: &'a Path,
    options: &'a WeightOptions<'a>,
    /// The path of the model's last layer.
    last_layer: String,
}

impl Demand<'_> {
    /// The tensors of a file without dictionaries, if there is no wish for another place.
    fn only<'a>(&self, tensors: impl Iterator<Item = (&'a str, &'a [usize])>) -> Result<Vec<Candidate<'a>>> {
        let tensors =
            tensors.enumerate().map(|(place, (name, shape))| Listed { name, shape, place }).collect();
        chosen(self.file, vec![Candidate { keys: Vec::new(), tensors }], self.options.state_dict)
    }

    /// What fits best, which must be as much as the options demand.
    fn fit<'a>(&self, values: &[(String, Value)], candidates: &'a [Candidate<'a>]) -> Result<Fit<'a>> {
        let fit = best_fit(values, candidates, self.options);
        fit.check(self)?;
        Ok(fit)
    }
}

/// What of a file goes where.
struct Fit<'a> {
    found: LoadedWeights,
    /// Which of the model's values each listed tensor is.
    pairs: Vec<(usize, &'a Listed<'a>)>,
}

/// The candidate with the most names of the model, and what of it fits.
fn best_fit<'a>(
    values: &[(String, Value)],
    candidates: &'a [Candidate<'a>],
    options: &WeightOptions<'_>,
) -> Fit<'a> {
    let known: HashMap<&str, usize> =
        values.iter().enumerate().map(|(index, (name, _))| (name.as_str(), index)).collect();
    let has_blocks = options.rename.is_none() && known.keys().any(|name| name.ends_with(".conv.weight"));
    let schemes = [Scheme::AsTheyAre, Scheme::Blocks].into_iter().take(if has_blocks { 2 } else { 1 });
    let matched = candidates.iter().flat_map(|candidate| {
        let match_names = |scheme| (candidate, match_names(&known, candidate, (options, scheme)));
        schemes.clone().map(match_names).collect::<Vec<_>>()
    });
    let matched: Vec<_> = matched.collect();
    let score = |(candidate, matched): &(&Candidate<'_>, Matched)| {
        (matched.model.iter().flatten().count(), Reverse(rank(&candidate.keys)))
    };
    // `max_by_key` takes the last of equals, and the first is wanted.
    let best = matched.into_iter().rev().max_by_key(score);
    let (candidate, matched) = best.expect("there is a candidate");
    let mut fit = Fit {
        found: LoadedWeights {
            state_dict: candidate.keys.join("."),
            prefix: matched.prefix,
            ..LoadedWeights::default()
        },
        pairs: Vec::new(),
    };
    let mut absent = vec![true; values.len()];
    for (listed, model) in candidate.tensors.iter().zip(matched.model) {
        let Some(model) = model else {
            if !is_auxiliary(listed.name) {
                fit.found.unexpected.push(listed.name.to_owned());
            }
            continue;
        };
        absent[model] = false;
        let (name, value) = &values[model];
        match described(value).1 {
            shape if shape == listed.shape => fit.pairs.push((model, listed)),
            shape => fit.found.other_shape.push(OtherShape {
                name: name.clone(),
                file: listed.shape.to_vec(),
                model: shape.to_vec(),
            }),
        }
    }
    fit.found.loaded = fit.pairs.len();
    let names = values.iter().zip(absent).filter(|((name, _), absent)| *absent && !may_be_absent(name));
    fit.found.missing = names.map(|((name, _), _)| name.clone()).collect();
    fit
}

/// Whether a tensor belongs to torchvision's auxiliary head for masks, which models may lack.
fn is_auxiliary(name: &str) -> bool {
    name.split('.').any(|part| part == "aux_classifier")
}

/// The order of candidates that fit alike.
fn rank(keys: &[&str]) -> usize {
    match keys.last().map_or("", |key| key) {
        "" => 0,
        "state_dict" => 1,
        "model_state_dict" => 2,
        "model" => 3,
        // A moving average of the weights.
        key if key.contains("ema") => 5,
        _ => 4,
    }
}

/// For each tensor of a candidate, which of the model's values has its name.
struct Matched {
    prefix: String,
    model: Vec<Option<usize>>,
}

/// How a file names the convolutions and batch norms of a model.
#[derive(Clone, Copy, PartialEq)]
enum Scheme {
    AsTheyAre,
    /// As torchvision's residual networks, `conv1.weight` and `bn1.weight`, of which a model of blocks makes `conv1.conv.weight` and
    /// `conv1.bn.weight`.
    Blocks,
}

/// The name in a model of blocks for a name of torchvision's.
fn in_block(name: &str) -> Option<String> {
    let (layer, parameter) = name.rsplit_once('.')?;
    let (before, own) = layer.rsplit_once('.').map_or(("", layer), |(before, own)| (before, own));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let block = match own {
        "0" | "1" if before.rsplit('.').next() == Some("downsample") => {
            return Some(format!("{before}.{}.{parameter}", if own == "0" { "conv" } else { "bn" }));
        }
        _ => match (own.strip_prefix("conv"), own.strip_prefix("bn")) {
            (Some(number), _) if is_number(number) => format!("conv{number}.conv"),
            (_, Some(number)) if is_number(number) => format!("conv{number}.bn"),
            _ => return None,
        },
    };
    let dot = if before.is_empty() { "" } else { "." };
    Some(format!("{before}{dot}{block}.{parameter}"))
}

fn match_names(
    known: &HashMap<&str, usize>,
    candidate: &Candidate<'_>,
    (options, scheme): (&WeightOptions<'_>, Scheme),
) -> Matched {
    let model_name = |listed: &Listed<'_>| {
        let name = model_name(known, listed.name, options);
        match scheme {
            Scheme::AsTheyAre => name,
            Scheme::Blocks => in_block(&name).unwrap_or(name),
        }
    };
    let names: Vec<String> = candidate.tensors.iter().map(model_name).collect();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for name in names.iter().filter(|name| name.len() <= LONGEST_NAME) {
        let ends = name.match_indices('.').map(|(dot, _)| dot + 1).take(MOST_PREFIXES);
        for (prefix, rest) in [0].into_iter().chain(ends).map(|end| name.split_at(end)) {
            if known.contains_key(rest) {
                *counts.entry(prefix).or_default() += 1;
            }
        }
    }
    let without = counts.get("").copied().unwrap_or(0);
    let best =
        counts.into_iter().max_by_key(|&(prefix, count)| (count, Reverse(prefix.len()), Reverse(prefix)));
    let prefix = match best {
        Some((prefix, count)) if count > without && 2 * count > known.len() => prefix,
        _ => "",
    };
    let mut taken = vec![false; known.len()];
    let mut model = vec![None; names.len()];
    // Names with the prefix go first.
    for prefix in [prefix, ""] {
        for (name, model) in names.iter().zip(&mut model).filter(|(_, model)| model.is_none()) {
            let place = name.strip_prefix(prefix).and_then(|name| known.get(name));
            *model = place.copied().filter(|place| !std::mem::replace(&mut taken[*place], true));
        }
    }
    Matched { prefix: prefix.to_owned(), model }
}

/// A file's name without what wrappers add, renamed as the options say.
fn model_name(known: &HashMap<&str, usize>, name: &str, options: &WeightOptions<'_>) -> String {
    const WRAPPERS: [&str; 3] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];
    let mut bare = name.to_owned();
    if !known.contains_key(name) {
        let parts: Vec<&str> = name.split('.').filter(|part| !WRAPPERS.contains(part)).collect();
        let wraps = parts.iter().take_while(|part| **part == "module").count();
        bare = parts[wraps..].join(".");
    }
    options.rename.map_or_else(|| bare.clone(), |rename| rename(&bare))
}

impl Fit<'_> {
    /// Fails unless it fits as the options demand.
    fn check(&self, Demand { file, options, last_layer }: &Demand<'_>) -> Result<()> {
        let found = &self.found;
        let classes = found.other_shape.first().and_then(|first| first.file.first());
        let is_head = |other: &OtherShape| {
            layer_of(&other.name) == *last_layer
                && other.file.first() == classes
                && !other.model.is_empty()
                && other.file.get(1..) == other.model.get(1..)
        };
        let shapes_fit = found.other_shape.iter().all(|other| options.new_head && is_head(other));
        let fits = shapes_fit && found.missing.is_empty() && found.unexpected.is_empty();
        match found.loaded > 0 && (fits || options.partial) {
            true => Ok(()),
            false => {
                Err(CheckpointError::Weights { file: file.to_path_buf(), found: Box::new(found.clone()) })
            }
        }
    }
}

/// Reads the tensors that fit, one storage at a time.
fn read_torch(
    file: &Path,
    torch: &Saved,
    unpickled: &Unpickled<'_>,
    fit: &Fit<'_>,
    values: &mut [(String, Value)],
) -> Result<()> {
    let mut by_storage: BTreeMap<&str, Vec<(usize, &Tensor<'_>)>> = BTreeMap::new();
    for (model, listed) in &fit.pairs {
        let tensor = &unpickled.tensors[listed.place];
        by_storage.entry(tensor.storage.key).or_default().push((*model, tensor));
    }
    for (key, tensors) in by_storage {
        let bytes = torch.storage(key)?;
        for (model, tensor) in tensors {
            let size = pickle::element_size(tensor.storage.dtype);
            if bytes.len() / size != tensor.storage.len {
                let reason = format!(
                    "its storage {key} has {} bytes, not {} elements",
                    bytes.len(),
                    tensor.storage.len
                );
                return Err(damaged(file, reason));
            }
            let (name, value) = &mut values[model];
            let numbers = Numbers {
                dtype: tensor.storage.dtype,
                shape: &tensor.shape,
                bytes: bytes.get(tensor.offset.saturating_mul(size)..).unwrap_or_default(),
                strides: (!tensor.is_contiguous()).then_some(&tensor.strides),
            };
            *value = read_value(file, name, &numbers, value, Conversion::AnyFloat)?;
        }
    }
    Ok(())
}
